// bf16 attention in the matrix unit: one segment of keys for a tile's query rows.
//
// A step is what 16 rows do with a block of 64 keys, and blocks come one after the other, for all rows of the tile: so
// keys, values, scores and probabilities stay in the first cache. While a step's probabilities are computed, the matrix
// unit multiplies the next one's scores and the last one's values.
//
// A row's probabilities are relative to its largest score in the first block of the segment that it sees, and may so be
// larger than 1: bf16 has room. Only where one is larger than 2^32 is the row's reference raised, and what it has
// summed scaled down.
//
// A group of keys is a tile as it lies in the cache (pairs of dimensions x 16 tokens), and so are two groups of values
// (16 pairs of tokens x 16 dimensions). Probabilities are rounded to bf16 before they are summed: the weights of the
// values then add up to what they are divided by. Their sum is one more column of the product, with values of 1.

#include "tiles.h"

namespace millstream::MS_LEVEL {

constexpr int kBlockGroups = 4;
constexpr int kBlockTokens = kBlockGroups * kLanes;
constexpr int kBlocks = kSegment / kBlockTokens;  // in a segment
constexpr int kColumns = 4 * kLanes;              // of values that are summed at once

// Tile registers 0 to 3: results. 4: query rows or probabilities. 5: keys or values. 6 and 7 are as 4 and 5 for the
// last half tile of a head that is an odd number of 16 dimensions wide.
MS_INLINE void shape_tiles(Tile<bf16>& tile) {
    const int rows = tile.num_rows < kUnitRows ? tile.num_rows : kUnitRows;
    if (tile.unit_rows == rows) return;
    tile.unit_rows = rows;
    TileShapes shapes;
    for (int i = 0; i < 5; i++) shapes.set(i, rows, 64);
    shapes.set(5, kUnitPairs, 64);
    shapes.set(6, rows, 32);
    shapes.set(7, kUnitPairs / 2, 64);
    shapes.use();
}

void end_tiles() { release_tiles(); }

// Results are made four tiles at a time, side by side, or the last ones alone: N is 4 or 1.
template <int N>
MS_INLINE void zero_results() {
    zero_tile<0>();
    if constexpr (N == 4) {
        zero_tile<1>();
        zero_tile<2>();
        zero_tile<3>();
    }
}

template <int N>
MS_INLINE void load_results(const float* from, int stride) {
    const std::ptrdiff_t bytes = sizeof(float) * stride;
    load_tile<0>(from, bytes);
    if constexpr (N == 4) {
        load_tile<1>(from + kLanes, bytes);
        load_tile<2>(from + 2 * kLanes, bytes);
        load_tile<3>(from + 3 * kLanes, bytes);
    }
}

template <int N>
MS_INLINE void store_results(float* out, int stride) {
    const std::ptrdiff_t bytes = sizeof(float) * stride;
    store_tile<0>(out, bytes);
    if constexpr (N == 4) {
        store_tile<1>(out + kLanes, bytes);
        store_tile<2>(out + 2 * kLanes, bytes);
        store_tile<3>(out + 3 * kLanes, bytes);
    }
}

// -- blocks and steps --------------------------------------------------------------------------------------------

// The groups of one segment that are in a block.
struct Block {
    int first, count;  // of the list's groups
    int column;        // of the first one among the block's tokens
    int position;      // of the block's first token
    bool is_plain;     // all rows see all its tokens
    const std::uint32_t* values[kBlockGroups / 2];  // of 32 tokens each: 16 rows of head_dim words
    int num_values;
};

struct Step {
    int row, num_rows;  // up to 16 of the tile's
    const Block* block;
    bool is_first;      // the rows have summed nothing of this segment yet
    float* score;       // [16][kBlockTokens]
    bf16* p;            // [16][kBlockTokens]
};

struct Segment {
    Tile<bf16>& tile;
    const GroupList& list;
    int num_blocks, num_units;
    bool has_late_rows;  // some rows do not see the segment's first tokens, as their window begins later
    Block block[kBlocks];
    float* out;  // [rows][head_dim + kLanes]: the weighted values, then the sum of the weights in all lanes

    int num_steps() const { return num_blocks * num_units; }
    int out_stride() const { return tile.head_dim + kLanes; }

    // Any `num_apart` steps in turn have memory of their own.
    Step step(int i, int num_apart) const {
        const int row = i % num_units * kUnitRows, left = tile.num_rows - row;
        const int at = i % num_apart * kUnitRows * kBlockTokens;
        return {row, left < kUnitRows ? left : kUnitRows, block + i / num_units, i < num_units, tile.score + at,
                tile.p + at};
    }
};

// A copy of those values of 32 tokens that are there, with zeros for the others.
[[gnu::noinline]] void copy_values(const GroupList& list, int head_dim, int first_group, std::uint32_t* copy) {
    for (int g = first_group; g < first_group + 2; g++) {
        const bool is_listed = g >= 0 && g < list.count;
        const int left = is_listed ? list.tokens - g * kLanes : 0, num_tokens = left < kLanes ? left : kLanes;
        for (int pair = 0; pair < kLanes / 2; pair++, copy += head_dim) {
            const std::uint32_t* line = is_listed ? list.values()[g].p + pair * head_dim : nullptr;
            for (int i = 0; i < head_dim; i += kLanes) {
                W x = set1_word(0);
                if (2 * pair < num_tokens) x = load_words(line + i);
                // the other half of the last word is no token of this context yet, and may hold anything
                if (2 * pair + 1 == num_tokens) x = low_halves(x);
                store_words(copy + i, x);
            }
        }
    }
}

// Values that do not lie together, or are not all there, are copied to `spare`.
MS_INLINE void list_values(const GroupList& list, int head_dim, Block& block, std::uint32_t*& spare) {
    block.num_values = 0;
    for (int g = block.first - block.column / kLanes; g < block.first + block.count; g += 2) {
        // g is even in the segment, though not always in the list
        const bool is_whole = g >= 0 && (g + 2) * kLanes <= list.tokens;
        const std::uint32_t*& values = block.values[block.num_values++];
        if (is_whole && list.values()[g + 1].p == list.values()[g].p + kLanes / 2 * head_dim) {
            values = list.values()[g].p;
            continue;
        }
        copy_values(list, head_dim, g, spare);
        values = spare;
        spare += kUnitPairs * head_dim;
    }
}

MS_INLINE void list_blocks(Segment& segment, int first_position) {
    const Tile<bf16>& tile = segment.tile;
    const GroupList& list = segment.list;
    const int newest = position_of(tile, 0), oldest = oldest_of(tile, position_of(tile, tile.num_rows - 1));
    std::uint32_t* spare = reinterpret_cast<std::uint32_t*>(tile.spare);
    segment.num_blocks = 0;
    segment.has_late_rows = oldest > first_position;
    for (int g = list.first / kBlockGroups * kBlockGroups; g < list.first + list.count; g += kBlockGroups) {
        const int begin = g > list.first ? g - list.first : 0;
        const int end = g + kBlockGroups - list.first < list.count ? g + kBlockGroups - list.first : list.count;
        Block& block = segment.block[segment.num_blocks++];
        block.first = begin;
        block.count = end - begin;
        block.column = (list.first + begin - g) * kLanes;
        block.position = first_position + g * kLanes;
        block.is_plain = block.count == kBlockGroups && oldest <= block.position &&
                         block.position + kBlockTokens <= newest + 1;
        list_values(list, tile.head_dim, block, spare);
    }
    segment.out = reinterpret_cast<float*>(tile.spare) + kSegment / 2 * tile.head_dim;
}

MS_INLINE void prefetch_group(const Group& group, int num_lines) {
    for (int i = 0; i < num_lines; i++) prefetch(group.p + i * group.line_words);
}


// -- scores ------------------------------------------------------------------------------------------------------

// Adds the products of 32 dimensions (or the last 16, in tiles A and B of that shape) of the queries and N groups.
template <int N, int A, int B>
MS_INLINE void multiply_keys(const bf16* q, const Group* keys, int head_dim, int dim) {
    load_tile<A>(q + dim, sizeof(bf16) * head_dim);
    load_tile<B>(keys[0].p + dim / 2 * keys[0].line_words, 4 * keys[0].line_words);
    dot_tiles<0, A, B>();
    if constexpr (N == 4) {
        load_tile<B>(keys[1].p + dim / 2 * keys[1].line_words, 4 * keys[1].line_words);
        dot_tiles<1, A, B>();
        load_tile<B>(keys[2].p + dim / 2 * keys[2].line_words, 4 * keys[2].line_words);
        dot_tiles<2, A, B>();
        load_tile<B>(keys[3].p + dim / 2 * keys[3].line_words, 4 * keys[3].line_words);
        dot_tiles<3, A, B>();
    }
}

template <int N>
MS_INLINE void add_scores(const bf16* q, const Group* keys, int head_dim, int dim, float* score) {
    if (dim == 0) zero_results<N>();
    if (dim + kUnitInputs <= head_dim) {
        multiply_keys<N, 4, 5>(q, keys, head_dim, dim);
    } else {
        multiply_keys<N, 6, 7>(q, keys, head_dim, dim);
    }
    if (dim + kUnitInputs >= head_dim) store_results<N>(score, kBlockTokens);
}

// Adds the products of 32 dimensions from `dim` on; the scores are not scaled yet.
MS_INLINE void add_scores(const Segment& segment, const Step& step, int dim) {
    const int d = segment.tile.head_dim;
    const bf16* q = segment.tile.q + step.row * d;
    const Group* keys = segment.list.keys() + step.block->first;
    float* score = step.score + step.block->column;
    if (step.block->count == kBlockGroups) return add_scores<4>(q, keys, d, dim, score);
    if (dim > 0) return;
    for (int g = 0; g < step.block->count; g++) {
        for (int i = 0; i < d; i += kUnitInputs) add_scores<1>(q, keys + g, d, i, score + g * kLanes);
    }
}

// -- probabilities -----------------------------------------------------------------------------------------------

// 2^x for a result that is rounded to bf16; 0 below -126. A cubic on the fraction above the next lower whole number,
// with p(0) = 1: relative error 9e-5.
MS_INLINE __m512 exp2_for_bf16(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, 9);  // x - floor(x); 0 for minus infinity
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(7.7067133684e-02f), f, _mm512_set1_ps(2.2764489135e-01f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9511680889e-01f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    // times 2^floor(x); a NaN stays one
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p, x);
}

// Scores of tokens outside [begin, end) of a group become minus infinity.
MS_INLINE void hide(float* score, int begin, int end) {
    const __mmask16 seen = static_cast<__mmask16>(first_lanes(end) & ~first_lanes(begin));
    _mm512_storeu_ps(score, _mm512_mask_blend_ps(seen, _mm512_set1_ps(kNone), _mm512_loadu_ps(score)));
}

// What the rows do not see of the block, or what is not in the list.
MS_INLINE void hide_unseen(const Tile<bf16>& tile, const Step& step) {
    const Block& block = *step.block;
    for (int i = 0; i < step.num_rows; i++) {
        const int position = position_of(tile, step.row + i), oldest = oldest_of(tile, position) - block.position;
        const int begin = oldest > block.column ? oldest : block.column;
        const int listed = block.column + block.count * kLanes, seen = position + 1 - block.position;
        const int end = seen < listed ? seen : listed;
        float* score = step.score + i * kBlockTokens;
        for (int z = 0; z < kBlockTokens; z += kLanes) {
            if (z < begin || z + kLanes > end) hide(score + z, begin - z, end - z);
        }
    }
}

// Two vectors become one: the larger of the halves of each, and so on. Of 16 vectors one with all maxima is left.
MS_INLINE __m512 max_of_halves(__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
MS_INLINE __m512 max_of_quarters(__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
MS_INLINE __m512 max_of_pairs(__m512 a, __m512 b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
MS_INLINE __m512 max_of_neighbours(__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

MS_INLINE __m512 lanes_maxima(const float* score) {
    return _mm512_max_ps(_mm512_max_ps(_mm512_loadu_ps(score), _mm512_loadu_ps(score + kLanes)),
                         _mm512_max_ps(_mm512_loadu_ps(score + 2 * kLanes), _mm512_loadu_ps(score + 3 * kLanes)));
}

// The largest score of each of the rows, minus infinity for those that are not there.
MS_INLINE F row_maxima(const float* score, int num_rows) {
    if (num_rows < kUnitRows) {
        alignas(64) float each[kUnitRows];
        store(each, set1(kNone));
        for (int i = 0; i < num_rows; i++) each[i] = maximum({lanes_maxima(score + i * kBlockTokens)});
        return load(each);
    }
    __m512 x[2], y[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const float* s = score + (2 * j + i) * kBlockTokens;
            const __m512 a = max_of_halves(lanes_maxima(s), lanes_maxima(s + 8 * kBlockTokens));
            const __m512 b = max_of_halves(lanes_maxima(s + 4 * kBlockTokens), lanes_maxima(s + 12 * kBlockTokens));
            y[j] = max_of_quarters(a, b);
        }
        x[i] = max_of_pairs(y[0], y[1]);
    }
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return {_mm512_permutexvar_ps(order, max_of_neighbours(x[0], x[1]))};
}

constexpr short kLargest = 0x4f80;  // how large a probability may be: 2^32 in bf16

// What scores are relative to: 0 where nothing was visible yet.
MS_INLINE F shift_of(F reference) { return if_less(reference, set1(-__FLT_MAX__), zero(), reference); }

MS_INLINE bool needs_reference(const Segment& segment, const Step& step) {
    return step.is_first || !step.block->is_plain || segment.has_late_rows;
}

// Rows that have seen nothing before get a reference, and those that need it a higher one. It follows from the row
// alone, however its neighbours fare: a probability is too large where the one of the largest score is, rounded.
[[gnu::noinline]] void raise_references(const Segment& segment, const Step& step) {
    Tile<bf16>& tile = segment.tile;
    if (!step.block->is_plain) hide_unseen(tile, step);
    const F scale = set1(tile.args->scale * kLog2E), old = load(tile.segment_max + step.row);
    const F highest = row_maxima(step.score, step.num_rows);
    const __m512 p = exp2_for_bf16(_mm512_fmsub_ps(highest.v, scale.v, shift_of(old).v));
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(p));
    const __mmask16 is_large = _mm256_cmpgt_epi16_mask(rounded, _mm256_set1_epi16(kLargest));
    const __mmask16 is_new = _mm512_cmp_ps_mask(old.v, _mm512_set1_ps(kNone), _CMP_EQ_OQ);
    const __mmask16 is_raised = is_large | is_new;
    const F reference = {_mm512_mask_mul_ps(old.v, is_raised, highest.v, scale.v)};
    store(tile.segment_max + step.row, reference);
    store(tile.take + step.row, shift_of(reference));
    if (step.is_first || !is_raised) return;
    store(tile.keep, exp2<float>(old - shift_of(reference)));
    for (int i = 0; i < step.num_rows; i++) {
        if (!(is_raised >> i & 1)) continue;
        const F keep = set1(tile.keep[i]);
        float* out = segment.out + (step.row + i) * segment.out_stride();
        for (int z = 0; z < segment.out_stride(); z += kLanes) store(out + z, load(out + z) * keep);
    }
}

// Probabilities of the rows [begin, end) of a step; gives whether none is too large.
MS_INLINE bool probabilities_of(const Tile<bf16>& tile, const Step& step, int begin, int end) {
    const __m512 scale = _mm512_set1_ps(tile.args->scale * kLog2E);
    const __m512i largest = _mm512_set1_epi16(kLargest);
    __mmask32 is_large = 0;
    for (int i = begin; i < end; i++) {
        const float* score = step.score + i * kBlockTokens;
        const __m512 shift = _mm512_set1_ps(tile.take[step.row + i]);
#pragma GCC unroll 2
        for (int z = 0; z < kBlockTokens; z += kUnitInputs) {
            const __m512 low = exp2_for_bf16(_mm512_fmsub_ps(_mm512_loadu_ps(score + z), scale, shift));
            const __m512 high = exp2_for_bf16(_mm512_fmsub_ps(_mm512_loadu_ps(score + z + kLanes), scale, shift));
            const __m512i p = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
            is_large |= _mm512_cmpgt_epi16_mask(p, largest);
            _mm512_storeu_si512(step.p + i * kBlockTokens + z, p);
        }
    }
    return is_large == 0;
}

// -- values ------------------------------------------------------------------------------------------------------

template <int N>
MS_INLINE void multiply_values(const bf16* p, const std::uint32_t* values, int head_dim) {
    load_tile<4>(p, sizeof(bf16) * kBlockTokens);
    load_tile<5>(values, 4 * head_dim);
    dot_tiles<0, 4, 5>();
    if constexpr (N == 4) {
        load_tile<5>(values + kLanes, 4 * head_dim);
        dot_tiles<1, 4, 5>();
        load_tile<5>(values + 2 * kLanes, 4 * head_dim);
        dot_tiles<2, 4, 5>();
        load_tile<5>(values + 3 * kLanes, 4 * head_dim);
        dot_tiles<3, 4, 5>();
    }
}

// Steps of the same rows, one after the other.
struct Run {
    const Step* begin;
    const Step* end;
    const Group* ahead;  // what to fetch meanwhile
    const Group* ahead_end;
};

template <int N>
MS_INLINE void begin_results(const Run& run, const float* out, int stride) {
    if (run.begin->is_first) {
        zero_results<N>();
    } else {
        load_results<N>(out, stride);
    }
}

template <int N>
MS_INLINE void add_values(const Run& run, int head_dim, int column, float* out) {
    const int stride = head_dim + kLanes;
    const Group* ahead = column == 0 ? run.ahead : run.ahead_end;
    begin_results<N>(run, out, stride);
    for (const Step* step = run.begin; step < run.end; step++) {
        for (int i = 0; i < step->block->num_values; i++) {
            for (int n = 0; n < 2 && ahead < run.ahead_end; n++) prefetch_group(*ahead++, head_dim / 2);
            multiply_values<N>(step->p + i * kUnitInputs, step->block->values[i] + column, head_dim);
        }
    }
    store_results<N>(out, stride);
}

MS_INLINE void add_weights(const Run& run, int head_dim, float* out) {
    alignas(64) static const std::uint32_t kOnes[kLanes] = {
        0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80,
        0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    const int stride = head_dim + kLanes;
    begin_results<1>(run, out, stride);
    load_tile<5>(kOnes, 0);
    for (const Step* step = run.begin; step < run.end; step++) {
        for (int i = 0; i < step->block->num_values; i++) {
            load_tile<4>(step->p + i * kUnitInputs, sizeof(bf16) * kBlockTokens);
            dot_tiles<0, 4, 5>();
        }
    }
    store_results<1>(out, stride);
}

// Adds the weighted values of up to 64 columns, or the sum of the weights as the last part.
MS_INLINE void add_values(const Segment& segment, const Run& run, int part) {
    const int d = segment.tile.head_dim, column = part * kColumns;
    float* out = segment.out + run.begin->row * segment.out_stride();
    if (column >= d) return add_weights(run, d, out + d);
    if (column + kColumns <= d) return add_values<4>(run, d, column, out + column);
    for (int z = column; z < d; z += kLanes) add_values<1>(run, d, z, out + z);
}

MS_INLINE int num_score_parts(const Tile<bf16>& tile) { return (tile.head_dim + kUnitInputs - 1) / kUnitInputs; }
MS_INLINE int num_value_parts(const Tile<bf16>& tile) { return (tile.head_dim + kColumns - 1) / kColumns + 1; }

// What the matrix unit does beside the probabilities of a step, in parts: the scores of the next step, then the values
// of the last one.
struct Beside {
    const Segment& segment;
    const Step* next;  // null where there is none
    const Step* last;
    int num_score_parts, num_parts;

    Beside(const Segment& segment, const Step* next, const Step* last)
        : segment(segment), next(next), last(last),
          num_score_parts(next ? MS_LEVEL::num_score_parts(segment.tile) : 0),
          num_parts(num_score_parts + (last ? num_value_parts(segment.tile) : 0)) {}

    void run(int part) const {
        if (part < num_score_parts) {
            add_scores(segment, *next, part * kUnitInputs);
        } else {
            add_values(segment, {last, last + 1, nullptr, nullptr}, part - num_score_parts);
        }
    }
};

// Many rows: the matrix unit and the others at once.
MS_INLINE void run_side_by_side(const Segment& segment) {
    const Tile<bf16>& tile = segment.tile;
    const int num_steps = segment.num_steps();
    Step last{}, now = segment.step(0, 2), next{};
    for (int n = 0; n < num_score_parts(tile); n++) add_scores(segment, now, n * kUnitInputs);
    for (int i = 0; i < num_steps; i++) {
        const bool has_next = i + 1 < num_steps;
        if (has_next) next = segment.step(i + 1, 2);
        if (needs_reference(segment, now)) raise_references(segment, now);
        const Beside beside(segment, has_next ? &next : nullptr, i > 0 ? &last : nullptr);
        int part = 0;
        bool is_good = true;
        for (int begin = 0; begin < kUnitRows; begin += 4) {
            const int end = begin + 4 < now.num_rows ? begin + 4 : now.num_rows;
            is_good &= probabilities_of(tile, now, begin, end);
            for (; part < beside.num_parts * (begin + 4) / kUnitRows; part++) beside.run(part);
        }
        if (!is_good) {
            raise_references(segment, now);
            probabilities_of(tile, now, 0, now.num_rows);
        }
        last = now;
        now = next;
    }
    for (int n = 0; n < num_value_parts(tile); n++) add_values(segment, {&last, &last + 1, nullptr, nullptr}, n);
}

// Few rows: reading keys and values takes longer than all else, so they are read without a pause, a little at a time.
MS_INLINE void run_in_turn(const Segment& segment) {
    const Tile<bf16>& tile = segment.tile;
    const GroupList& list = segment.list;
    const int num_parts = num_score_parts(tile);
    Step step[kBlocks];
    const Group* ahead = list.keys() + kAheadGroups;
    for (int i = 0; i < segment.num_blocks; i++) {
        step[i] = segment.step(i, kBlocks);
        const Group* end = ahead + step[i].block->count;
        for (int n = 0; n < num_parts; n++) {
            for (int g = 0; g < (kBlockGroups + num_parts - 1) / num_parts && ahead < end; g++) {
                prefetch_group(*ahead++, tile.head_dim / 2);
            }
            add_scores(segment, step[i], n * kUnitInputs);
        }
    }
    Run run{step, step, list.values() + kAheadGroups, list.values() + kAheadGroups};
    auto add_run = [&]() __attribute__((always_inline)) {
        for (int n = 0; n < num_value_parts(tile) && run.begin < run.end; n++) add_values(segment, run, n);
        run.begin = run.end;
        run.ahead = run.ahead_end;
    };
    for (; run.end < step + segment.num_blocks; run.end++) {
        const Step& now = *run.end;
        if (needs_reference(segment, now) || !probabilities_of(tile, now, 0, now.num_rows)) {
            add_run();
            raise_references(segment, now);
            probabilities_of(tile, now, 0, now.num_rows);
        }
        run.ahead_end += now.block->count;
    }
    add_run();
}

void run_segment_tiles(Tile<bf16>& tile, int index, const GroupList& list) {
    shape_tiles(tile);
    Segment segment{tile, list, 0, (tile.num_rows + kUnitRows - 1) / kUnitRows, false, {}, nullptr};
    list_blocks(segment, index * kSegment);
    for (int i = 0; i < tile.num_rows; i += kLanes) store(tile.segment_max + i, set1(kNone));
    if (segment.num_units == 1) {
        run_in_turn(segment);
    } else {
        run_side_by_side(segment);
    }
    const int d = tile.head_dim, stride = segment.out_stride();
    for (int i = 0; i < tile.num_rows; i++) tile.segment_sum[i] = segment.out[i * stride + d];
    fold(tile.num_rows, tile.max, tile.sum, tile.segment_max, tile.segment_sum, tile.keep, tile.take);
    for (int i = 0; i < tile.num_rows; i++) {
        const F keep = set1(tile.keep[i]), take = set1(tile.take[i]);
        for (int z = 0; z < d; z += kLanes) {
            const F x = load(segment.out + i * stride + z) * take;
            store(tile.out + i * d + z, fma(load(tile.out + i * d + z), keep, x));
        }
    }
}

}  // namespace millstream::MS_LEVEL

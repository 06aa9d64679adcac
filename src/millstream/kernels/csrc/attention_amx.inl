// bf16 attention in the matrix unit: one segment of keys for a tile's query rows, 16 of them at a time, so that their
// scores and probabilities stay in the first cache.
//
// A group of keys is a tile as it lies in the cache (pairs of dimensions x 16 tokens), and so are two groups of values
// (16 pairs of tokens x 16 dimensions). Probabilities are rounded to bf16 before they are summed: the weights of the
// values then add up to what they are divided by. Their sum is one more column of the product, with values of 1.

#include "tiles.h"

namespace millstream::MS_LEVEL {

constexpr int kValueTiles = kSegment / kUnitInputs;

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
MS_INLINE void store_results(float* out, int stride) {
    const std::ptrdiff_t bytes = sizeof(float) * stride;
    store_tile<0>(out, bytes);
    if constexpr (N == 4) {
        store_tile<1>(out + kLanes, bytes);
        store_tile<2>(out + 2 * kLanes, bytes);
        store_tile<3>(out + 3 * kLanes, bytes);
    }
}

// -- scores ------------------------------------------------------------------------------------------------------

MS_INLINE void prefetch_group(const Group& group, int num_lines) {
    for (int i = 0; i < num_lines; i++) prefetch(group.p + i * group.line_words);
}

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

// Not scaled yet.
template <int N>
MS_INLINE void scores_of_groups(const bf16* q, const Group* keys, int head_dim, float* score) {
    zero_results<N>();
    int dim = 0;
    for (; dim + kUnitInputs <= head_dim; dim += kUnitInputs) multiply_keys<N, 4, 5>(q, keys, head_dim, dim);
    if (dim < head_dim) multiply_keys<N, 6, 7>(q, keys, head_dim, dim);
    store_results<N>(score, kScoreStride);
}

// Of 16 rows with all listed groups, at their place in the segment.
MS_INLINE void scores_of_unit(const Tile<bf16>& tile, const bf16* q, const GroupList& list, bool is_ahead) {
    const int d = tile.head_dim;
    float* score = tile.score + list.first * kLanes;
    int g = 0;
    for (; g + 4 <= list.count; g += 4) {
        if (is_ahead) {
            for (int i = g; i < g + 4; i++) prefetch_group(list.group[i + kAheadGroups], d / 2);
        }
        scores_of_groups<4>(q, list.keys() + g, d, score + g * kLanes);
    }
    for (; g < list.count; g++) {
        if (is_ahead) prefetch_group(list.group[g + kAheadGroups], d / 2);
        scores_of_groups<1>(q, list.keys() + g, d, score + g * kLanes);
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

// Probabilities of one row relative to the segment's own maximum, for whole tiles of values.
MS_INLINE void probabilities_of(Tile<bf16>& tile, int row, int segment, const GroupList& list, float* score, bf16* p) {
    const int position = position_of(tile, row), base = segment * kSegment, end_group = list.first + list.count;
    const int begin = oldest_of(tile, position) - base, end = position + 1 - base;  // of the visible tokens
    for (int g = list.first; g < end_group && g * kLanes < begin; g++) {
        hide(score + g * kLanes, begin - g * kLanes, kLanes);
    }
    for (int g = end > list.first * kLanes ? end / kLanes : list.first; g < end_group; g++) {
        hide(score + g * kLanes, 0, end - g * kLanes);
    }
    if (list.first % 2) hide(score + (list.first - 1) * kLanes, 0, 0);
    if (end_group % 2) hide(score + end_group * kLanes, 0, 0);
    const int first = list.first / 2 * kUnitInputs, last = (end_group + 1) / 2 * kUnitInputs;
    __m512 m0 = _mm512_set1_ps(kNone), m1 = m0;
    for (int i = first; i < last; i += kUnitInputs) {
        m0 = _mm512_max_ps(m0, _mm512_loadu_ps(score + i));
        m1 = _mm512_max_ps(m1, _mm512_loadu_ps(score + i + kLanes));
    }
    const float factor = tile.args->scale * kLog2E, highest = maximum({_mm512_max_ps(m0, m1)}) * factor;
    const __m512 scale = _mm512_set1_ps(factor), shift = _mm512_set1_ps(highest == kNone ? 0.0f : highest);
    for (int i = first; i < last; i += kUnitInputs) {
        const __m512 low = exp2_for_bf16(_mm512_fmsub_ps(_mm512_loadu_ps(score + i), scale, shift));
        const __m512 high = exp2_for_bf16(_mm512_fmsub_ps(_mm512_loadu_ps(score + i + kLanes), scale, shift));
        _mm512_storeu_si512(p + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    }
    tile.segment_max[row] = highest;
}

// -- values ------------------------------------------------------------------------------------------------------

// A copy of those values of 32 tokens that are there, with zeros for the others.
[[gnu::noinline]] void copy_values(const GroupList& list, int head_dim, int first_group, std::uint32_t* copy) {
    for (int h = 0; h < 2; h++) {
        const int g = first_group + h - list.first;
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

// Where the values of 32 tokens each lie, 16 rows of head_dim words, from the list's first tokens to its last; gives
// how many there are. Those that do not lie together, or are not all there, are copied to the tile's spare memory.
MS_INLINE int list_values(const Tile<bf16>& tile, const GroupList& list, const std::uint32_t** values) {
    const int d = tile.head_dim, end = list.first + list.count;
    std::uint32_t* copy = reinterpret_cast<std::uint32_t*>(tile.spare);
    int n = 0;
    for (int first = list.first / 2 * 2; first < end; first += 2, n++) {
        const int g = first - list.first;
        const bool is_whole = g >= 0 && (g + 2) * kLanes <= list.tokens;
        if (is_whole && list.values()[g + 1].p == list.values()[g].p + kLanes / 2 * d) {
            values[n] = list.values()[g].p;
            continue;
        }
        copy_values(list, d, first, copy);
        values[n] = copy;
        copy += kUnitPairs * d;
    }
    return n;
}

template <int N>
MS_INLINE void multiply_values(const bf16* p, const std::uint32_t* values, int head_dim) {
    load_tile<4>(p, sizeof(bf16) * kProbStride);
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

// Rows of a tile that the matrix unit takes together.
struct Unit {
    int row, num_rows;
    const bf16* p;  // [rows][kProbStride], from the first of the values on
    const std::uint32_t* const* values;
    int num_values;
};

// Columns [0, 16 N) from `column` of `out`, which becomes keep * out + take * product. Fetches the groups [next, end).
template <int N>
MS_INLINE void weigh_columns(const Tile<bf16>& tile, const Unit& unit, int column, const Group* next,
                             const Group* end) {
    alignas(64) float c[kUnitRows * N * kLanes];
    const int d = tile.head_dim;
    zero_results<N>();
    for (int i = 0; i < unit.num_values; i++) {
        for (int n = 0; n < kUnitInputs / kLanes && next < end; n++) prefetch_group(*next++, d / 2);
        multiply_values<N>(unit.p + i * kUnitInputs, unit.values[i] + column, d);
    }
    store_results<N>(c, N * kLanes);
    for (int i = 0; i < unit.num_rows; i++) {
        const F keep = set1(tile.keep[unit.row + i]), take = set1(tile.take[unit.row + i]);
        float* out = tile.out + (unit.row + i) * d + column;
#pragma GCC unroll 4
        for (int z = 0; z < N * kLanes; z += kLanes) {
            store(out + z, fma(load(out + z), keep, load(c + i * N * kLanes + z) * take));
        }
    }
}

MS_INLINE void weigh_values(const Tile<bf16>& tile, const Unit& unit, const Group* next, const Group* end) {
    int column = 0;
    for (; column + 4 * kLanes <= tile.head_dim; column += 4 * kLanes, next = end) {
        weigh_columns<4>(tile, unit, column, next, end);
    }
    for (; column < tile.head_dim; column += kLanes, next = end) weigh_columns<1>(tile, unit, column, next, end);
}

MS_INLINE void sum_probabilities(Tile<bf16>& tile, const Unit& unit) {
    alignas(64) static const std::uint32_t kOnes[kLanes] = {
        0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80,
        0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    alignas(64) float c[kUnitRows * kLanes];
    zero_results<1>();
    load_tile<5>(kOnes, 0);
    for (int i = 0; i < unit.num_values; i++) {
        load_tile<4>(unit.p + i * kUnitInputs, sizeof(bf16) * kProbStride);
        dot_tiles<0, 4, 5>();
    }
    store_results<1>(c, kLanes);
    for (int i = 0; i < unit.num_rows; i++) tile.segment_sum[unit.row + i] = c[i * kLanes];
}

void run_segment_tiles(Tile<bf16>& tile, int segment, const GroupList& list) {
    shape_tiles(tile);
    const std::uint32_t* values[kValueTiles];
    Unit unit{0, 0, tile.p + list.first / 2 * kUnitInputs, values, list_values(tile, list, values)};
    for (int row = 0; row < tile.num_rows; row += kUnitRows) {
        const int left = tile.num_rows - row, n = left < kUnitRows ? left : kUnitRows;
        unit.row = row;
        unit.num_rows = n;
        // tiles hold 16 rows if there are as many: before the last few, the scores of some are computed once more
        const int again = tile.unit_rows - n;
        const bool is_ahead = row == 0;  // the first rows fetch the next keys and values, for the others they are near
        scores_of_unit(tile, tile.q + (row - again) * tile.head_dim, list, is_ahead);
        for (int i = 0; i < n; i++) {
            probabilities_of(tile, row + i, segment, list, tile.score + (again + i) * kScoreStride,
                             tile.p + i * kProbStride);
        }
        sum_probabilities(tile, unit);
        fold(n, tile.max + row, tile.sum + row, tile.segment_max + row, tile.segment_sum + row, tile.keep + row,
             tile.take + row);
        const Group* next = list.values() + kAheadGroups;
        weigh_values(tile, unit, next, is_ahead ? next + list.count : next);
    }
}

}  // namespace millstream::MS_LEVEL

// Causal attention over the paged KV cache, for chunks of prompts and single tokens alike.
//
// Keys are reduced in segments of kSegment at positions that are multiples of it. Within a segment: scores, their
// maximum, probabilities relative to it, their sum, and the weighted values, token by token in order. Segments are
// folded from the first to the last. So a token's result has the same bits whatever its tile, chunk, batch or thread:
// what differs is only how many zeros (masked keys, exactly 0) are added, and adding 0 changes nothing.

#include "schedule.h"

namespace millstream::MS_LEVEL {

constexpr float kNone = -__builtin_inff();
constexpr int kGroups = kSegment / kLanes;  // groups of 16 tokens in a segment
// Groups that are fetched ahead of use, into the second cache: 16 requests of 512 tokens 343 us, 521 into the first,
// which can wait for too few lines at once (Zen 4, one thread; as long without fetching ahead at all).
constexpr int kAheadGroups = 4;

// Keys or values of 16 tokens: a run of 64-byte lines.
struct Group {
    const std::uint32_t* p;
    int line_words;  // from one line to the next
};

// The groups of a segment in the order of use, then the first ones of what the thread does next.
struct GroupList {
    int first;   // of the segment's groups; those before are masked for every row
    int count;
    int tokens;  // from the first group's start to the last visible token
    Group group[2 * kGroups + kAheadGroups];  // count of keys, count of values, then the next unit's

    const Group* keys() const { return group; }
    const Group* values() const { return group + count; }
};

template <class T>
struct Tile {
    const AttentionArgs* args;
    const AttentionItem* item;
    int num_rows, head_dim;
    T* q;          // [rows][head_dim]
    float* score;  // [rows][kScoreStride]
    T* p;          // [rows][kProbStride]
    float* out;    // [rows][head_dim]
    char* spare;   // the rest of the thread's memory
    int unit_rows; // rows of the matrix unit's tiles as they are shaped now, where there are any
    float max[kTileRows], sum[kTileRows];                  // of the segments so far
    float segment_max[kTileRows], segment_sum[kTileRows];  // of this segment
    float keep[kTileRows], take[kTileRows];                // factors of what was and of what the segment brings
};

// off a power of two, so that rows do not fall into the same sets of the cache
constexpr int kScoreStride = kSegment + 16;
constexpr int kProbStride = kSegment + 32;

// -- products ----------------------------------------------------------------------------------------------------

template <bool kAhead, int MR, int NG, class T>
[[gnu::noinline]] void score_tile(const T* q, int head_dim, const Group* k, F scale, float* score) {
    constexpr int kPer = 4 / sizeof(T);
    F acc[MR][NG];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int g = 0; g < NG; g++) acc[i][g] = zero();
    }
    const int words = head_dim / kPer;
#pragma GCC unroll 2
    for (int d = 0; d < words; d++) {
        W b[NG];
#pragma GCC unroll 4
        for (int g = 0; g < NG; g++) {
            b[g] = load_words(k[g].p + d * k[g].line_words);
            if (kAhead) prefetch(k[kAheadGroups + g].p + d * k[kAheadGroups + g].line_words);
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            W a = spread(q + i * head_dim + d * kPer);
#pragma GCC unroll 4
            for (int g = 0; g < NG; g++) acc[i][g] = dot(q, acc[i][g], a, b[g]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int g = 0; g < NG; g++) store(score + i * kScoreStride + g * kLanes, acc[i][g] * scale);
    }
}

// Values weighted with probabilities: columns [0, 16 NZ) of `out`, which becomes keep * out + take * product.
template <bool kAhead, int MR, int NZ, class T>
[[gnu::noinline]] void value_tile(const T* p, int head_dim, const Group* v, int column, int tokens, const float* keep,
                                  const float* take, float* out) {
    constexpr int kPer = 4 / sizeof(T);
    F acc[MR][NZ];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int z = 0; z < NZ; z++) acc[i][z] = zero();
    }
    auto step = [&](const std::uint32_t* row, const T* prob, bool is_half) __attribute__((always_inline)) {
        W b[NZ];
#pragma GCC unroll 4
        for (int z = 0; z < NZ; z++) {
            b[z] = load_words(row + z * kLanes);
            if (is_half) b[z] = low_halves(b[z]);
        }
#pragma GCC unroll 6
        for (int i = 0; i < MR; i++) {
            W a = spread(prob + i * kProbStride);
#pragma GCC unroll 4
            for (int z = 0; z < NZ; z++) acc[i][z] = dot(p, acc[i][z], a, b[z]);
        }
    };
    for (int t = 0; t < tokens; t += kLanes, v++) {
        const int n = tokens - t < kLanes ? tokens - t : kLanes;
        const std::uint32_t* row = v->p + column;
        const Group& next = v[kAheadGroups];
        int line = column / kLanes;
#pragma GCC unroll 2
        for (int s = 0; s + kPer <= n; s += kPer, row += head_dim, line += head_dim / kLanes) {
            if (kAhead) {
#pragma GCC unroll 4
                for (int z = 0; z < NZ; z++) prefetch(next.p + (line + z) * next.line_words);
            }
            step(row, p + t + s, false);
        }
        // the other half of the last word is no token of this context yet, and may hold anything
        if (n % kPer) step(row, p + t + n - 1, true);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
        const F k = set1(keep[i]), n = set1(take[i]);
#pragma GCC unroll 4
        for (int z = 0; z < NZ; z++) {
            float* o = out + i * head_dim + z * kLanes;
            store(o, fma(load(o), k, acc[i][z] * n));
        }
    }
}

// -- their dispatch on the number of rows ------------------------------------------------------------------------

constexpr int groups_at_once(int rows) { return 4 * rows <= kQkTiles ? 4 : 2; }

template <bool kAhead, class T, int MR = kQkRows>
MS_INLINE void scores_of(int num_rows, const T* q, int head_dim, const Group* k, int num_groups, F scale,
                         float* score) {
    if constexpr (MR > 0) {
        if (num_rows != MR) {
            return scores_of<kAhead, T, MR - 1>(num_rows, q, head_dim, k, num_groups, scale, score);
        }
        constexpr int kNG = groups_at_once(MR);
        int g = 0;
        for (; g + kNG <= num_groups; g += kNG) {
            score_tile<kAhead, MR, kNG>(q, head_dim, k + g, scale, score + g * kLanes);
        }
        for (; g < num_groups; g++) score_tile<kAhead, MR, 1>(q, head_dim, k + g, scale, score + g * kLanes);
    }
}

template <bool kAhead, int NZ, class T, int MR = kPvRows>
MS_INLINE void values_of(int num_rows, const T* p, int head_dim, const Group* v, int column, int tokens,
                         const float* keep, const float* take, float* out) {
    if constexpr (MR > 0) {
        if (num_rows == MR) {
            return value_tile<kAhead, MR, NZ>(p, head_dim, v, column, tokens, keep, take, out);
        }
        values_of<kAhead, NZ, T, MR - 1>(num_rows, p, head_dim, v, column, tokens, keep, take, out);
    }
}

template <bool kAhead, class T, int NZ = kPvCols>
MS_INLINE void values_of_columns(int num_columns, int num_rows, const T* p, int head_dim, const Group* v, int column,
                                 int tokens, const float* keep, const float* take, float* out) {
    if constexpr (NZ > 0) {
        if (num_columns == NZ) {
            return values_of<kAhead, NZ>(num_rows, p, head_dim, v, column, tokens, keep, take, out);
        }
        values_of_columns<kAhead, T, NZ - 1>(num_columns, num_rows, p, head_dim, v, column, tokens, keep, take, out);
    }
}

// -- one segment -------------------------------------------------------------------------------------------------

template <class T>
MS_INLINE int position_of(const Tile<T>& tile, int row) {
    return tile.item->first_position + row / tile.item->num_heads;
}

template <class T>
MS_INLINE int oldest_of(const Tile<T>& tile, int position) {
    const int window = tile.args->window;
    return window > 0 && position >= window ? position - window + 1 : 0;
}

// Probabilities of one row relative to the segment's own maximum.
template <class T>
MS_INLINE void softmax_row(Tile<T>& tile, int row, int segment, int first_group, int num_groups) {
    float* score = tile.score + row * kScoreStride;
    T* p = tile.p + row * kProbStride;
    const int base = segment * kSegment + first_group * kLanes, position = position_of(tile, row);
    const int begin = oldest_of(tile, position) - base, end = position + 1 - base;  // of the visible tokens
    for (int i = 0; i < begin && i < num_groups * kLanes; i++) score[i] = kNone;
    for (int i = end > 0 ? end : 0; i < num_groups * kLanes; i++) score[i] = kNone;
    F m0 = set1(kNone), m1 = m0;
    int g = 0;
    for (; g + 2 <= num_groups; g += 2) {
        m0 = max(m0, load(score + g * kLanes));
        m1 = max(m1, load(score + (g + 1) * kLanes));
    }
    if (g < num_groups) m0 = max(m0, load(score + g * kLanes));
    const float segment_max = maximum(max(m0, m1));
    const F m = set1(segment_max == kNone ? 0.0f : segment_max);
    // a group adds to the sum of its own parity in the segment, so that leaving out groups of zeros changes nothing
    F sums[2] = {zero(), zero()};
    g = 0;
    if (first_group % 2 == 1) {
        F e = exp2<T>(load(score) - m);
        sums[1] = sums[1] + e;
        store(p, e);
        g = 1;
    }
    for (; g + 2 <= num_groups; g += 2) {
        F e0 = exp2<T>(load(score + g * kLanes) - m), e1 = exp2<T>(load(score + (g + 1) * kLanes) - m);
        sums[0] = sums[0] + e0;
        sums[1] = sums[1] + e1;
        store(p + g * kLanes, e0);
        store(p + (g + 1) * kLanes, e1);
    }
    if (g < num_groups) {
        F e = exp2<T>(load(score + g * kLanes) - m);
        sums[0] = sums[0] + e;
        store(p + g * kLanes, e);
    }
    tile.segment_max[row] = segment_max;
    tile.segment_sum[row] = sum(sums[0] + sums[1]);
}

// The states (max, sum) of rows take in a segment's; gives the factors for the weighted values. Arrays of kTileRows.
MS_INLINE void fold(int num_rows, float* max_, float* sum_, const float* segment_max, const float* segment_sum,
                    float* keep, float* take) {
    const F none = set1(kNone), lowest = set1(-__FLT_MAX__);
    for (int i = 0; i < num_rows; i += kLanes) {
        const F m = load(max_ + i), n = load(segment_max + i), new_max = max(m, n);
        const F shift = if_less(new_max, lowest, zero(), new_max);  // where nothing was visible yet
        const F k = exp2<float>(m - shift), t = exp2<float>(n - shift);
        store(sum_ + i, fma(load(sum_ + i), k, load(segment_sum + i) * t));
        store(max_ + i, if_less(new_max, lowest, none, new_max));
        store(keep + i, k);
        store(take + i, t);
    }
}

template <class T>
MS_INLINE void run_segment(Tile<T>& tile, int segment, const GroupList& list) {
    const int rows = tile.num_rows, d = tile.head_dim;
    const F scale = set1(tile.args->scale * kLog2E);
    // only the first pass over a segment fetches ahead; tiles of many passes compute longer than memory takes
    for (int i = 0; i < rows; i += kQkRows) {
        const int n = rows - i < kQkRows ? rows - i : kQkRows;
        if (i == 0) {
            scores_of<true>(n, tile.q, d, list.keys(), list.count, scale, tile.score);
        } else {
            scores_of<false>(n, tile.q + i * d, d, list.keys(), list.count, scale, tile.score + i * kScoreStride);
        }
    }
    for (int i = 0; i < rows; i++) softmax_row(tile, i, segment, list.first, list.count);
    fold(rows, tile.max, tile.sum, tile.segment_max, tile.segment_sum, tile.keep, tile.take);
    for (int i = 0; i < rows; i += kPvRows) {
        const int n = rows - i < kPvRows ? rows - i : kPvRows;
        for (int column = 0; column < d; column += kPvCols * kLanes) {
            const int columns = (d - column) / kLanes < kPvCols ? (d - column) / kLanes : kPvCols;
            const T* p = tile.p + i * kProbStride;
            float* out = tile.out + i * d + column;
            if (i == 0) {
                values_of_columns<true>(columns, n, p, d, list.values(), column, list.tokens, tile.keep + i,
                                        tile.take + i, out);
            } else {
                values_of_columns<false>(columns, n, p, d, list.values(), column, list.tokens, tile.keep + i,
                                         tile.take + i, out);
            }
        }
    }
}

void run_segment_tiles(Tile<bf16>& tile, int segment, const GroupList& list);  // attention_amx.inl, where kHasTiles
void end_tiles();

// -- items and parts ---------------------------------------------------------------------------------------------

MS_INLINE Group group_at(const AttentionArgs& a, const AttentionItem& item, int position, bool is_value) {
    const KVCache& cache = *a.cache;
    const StepTables& tables = *a.tables;
    const std::int32_t* table = tables.block_table + static_cast<std::ptrdiff_t>(item.request) * tables.block_stride;
    const int offset = position % cache.block_size;
    const std::size_t plane_words = cache.plane_bytes() / 4;
    const std::size_t block = table[position / cache.block_size];
    const std::uint32_t* keys = static_cast<const std::uint32_t*>(cache.data) +
                                (block * cache.num_kv_heads + item.kv_head) * 2 * plane_words;
    if (!is_value) return {keys + offset, cache.block_size};
    return {keys + plane_words + offset * plane_words / cache.block_size, kLanes};
}

MS_INLINE void list_segment(const AttentionArgs& a, const AttentionItem& item, int segment, GroupList& list) {
    const int base = segment * kSegment, last = item.first_position + item.num_tokens;
    const int oldest = a.window > 0 && item.first_position >= a.window ? item.first_position - a.window + 1 : 0;
    const int begin = oldest > base ? oldest - base : 0, end = last - base < kSegment ? last - base : kSegment;
    list.first = begin / kLanes;
    list.count = (end + kLanes - 1) / kLanes - list.first;
    list.tokens = end - list.first * kLanes;
    for (int g = 0; g < list.count; g++) {
        const int position = base + (list.first + g) * kLanes;
        list.group[g] = group_at(a, item, position, false);
        list.group[list.count + g] = group_at(a, item, position, true);
    }
}

template <class T>
MS_INLINE void begin_tile(Tile<T>& tile, const AttentionItem& item) {
    const AttentionArgs& a = *tile.args;
    tile.item = &item;
    tile.num_rows = item.num_rows();
    const int d = tile.head_dim;
    for (int t = 0, row = 0; t < item.num_tokens; t++) {
        const std::ptrdiff_t token = item.first_token + t;
        __builtin_memcpy(tile.q + row * d, static_cast<const T*>(a.q) + (token * a.num_heads + item.first_head) * d,
                         sizeof(T) * item.num_heads * d);
        row += item.num_heads;
    }
}

template <class T>
MS_INLINE void clear_state(Tile<T>& tile) {
    for (int i = 0; i < kTileRows; i++) {  // rows beyond the tile's too: they are folded with it
        tile.max[i] = kNone;
        tile.sum[i] = tile.segment_max[i] = tile.segment_sum[i] = 0.0f;
    }
    for (int i = 0; i < tile.num_rows * tile.head_dim; i += kLanes) store(tile.out + i, zero());
}

template <class T>
MS_INLINE void save_record(const Tile<T>& tile, float* record) {
    const int rows = tile.num_rows;
    __builtin_memcpy(record, tile.max, sizeof(float) * rows);
    __builtin_memcpy(record + rows, tile.sum, sizeof(float) * rows);
    __builtin_memcpy(record + 2 * rows, tile.out, sizeof(float) * rows * tile.head_dim);
}

template <class T>
MS_INLINE void write_row(const AttentionArgs& a, const AttentionItem& item, int row, float sum, const float* x, int d) {
    const std::ptrdiff_t token = item.first_token + row / item.num_heads;
    T* out = static_cast<T*>(a.out) + (token * a.num_heads + item.first_head + row % item.num_heads) * d;
    const F scale = set1(1.0f / sum);
    for (int i = 0; i < d; i += kLanes) store(out + i, load(x + i) * scale);
}

// Folds the records of an item that several threads shared, in the tile's memory.
template <class T>
MS_INLINE void merge_cut(Tile<T>& tile, const AttentionCut& cut) {
    const AttentionArgs& a = *tile.args;
    const AttentionItem& item = a.schedule->items[cut.item];
    const int rows = item.num_rows(), d = tile.head_dim;
    const float* record = a.schedule->records + cut.first_record;
    tile.num_rows = rows;
    clear_state(tile);
    __builtin_memcpy(tile.max, record, sizeof(float) * rows);
    __builtin_memcpy(tile.sum, record + rows, sizeof(float) * rows);
    __builtin_memcpy(tile.out, record + 2 * rows, sizeof(float) * rows * d);
    for (int n = 1; n < cut.num_records; n++) {
        record += record_floats(item, d);
        __builtin_memcpy(tile.segment_max, record, sizeof(float) * rows);
        __builtin_memcpy(tile.segment_sum, record + rows, sizeof(float) * rows);
        fold(rows, tile.max, tile.sum, tile.segment_max, tile.segment_sum, tile.keep, tile.take);
        for (int i = 0; i < rows * d; i += kLanes) {
            const F keep = set1(tile.keep[i / d]), take = set1(tile.take[i / d]);
            store(tile.out + i, fma(load(tile.out + i), keep, load(record + 2 * rows + i) * take));
        }
    }
    for (int row = 0; row < rows; row++) write_row<T>(a, item, row, tile.sum[row], tile.out + row * d, d);
}

// What is read now and what is read next.
struct Lists {
    GroupList list[2];
    int current = 0;
    int part = -1;  // whose first segment is listed
};

// Computes the schedule's part n; then comes part `after` (-1: none, or it is not known).
template <class T>
MS_INLINE void run_part(Tile<T>& tile, int n, int after, Lists& lists) {
    const AttentionArgs& a = *tile.args;
    const AttentionSchedule& schedule = *a.schedule;
    const AttentionPart& part = schedule.parts[n];
    const AttentionItem& item = schedule.items[part.item];
    const bool is_first = part.segment_begin == item.segment_begin;
    if (lists.part != n) list_segment(a, item, part.segment_begin, lists.list[lists.current]);
    begin_tile(tile, item);
    clear_state(tile);
    for (int s = part.segment_begin; s < part.segment_end; s++) {
        GroupList& list = lists.list[lists.current];
        GroupList& next = lists.list[1 - lists.current];
        const bool is_last = s + 1 == part.segment_end;
        next.count = 0;
        if (!is_last) {
            list_segment(a, item, s + 1, next);
        } else if (after >= 0) {
            list_segment(a, schedule.items[schedule.parts[after].item], schedule.parts[after].segment_begin, next);
        }
        for (int g = 0; g < kAheadGroups; g++) {
            list.group[2 * list.count + g] = g < next.count ? next.group[g] : list.group[0];
        }
        if constexpr (kHasTiles && sizeof(T) == 2) {
            run_segment_tiles(tile, s, list);
        } else {
            run_segment(tile, s, list);
        }
        if (part.record >= 0 && (!is_first || is_last)) {
            const int at = is_first ? 0 : s - part.segment_begin;
            save_record(tile, schedule.records + part.record + at * record_floats(item, tile.head_dim));
            clear_state(tile);
        }
        lists.current = 1 - lists.current;
    }
    lists.part = after;
    if (part.record >= 0) return;
    for (int i = 0; i < tile.num_rows; i++) {
        write_row<T>(a, item, i, tile.sum[i], tile.out + i * tile.head_dim, tile.head_dim);
    }
}

template <class T>
void attention_of(const AttentionArgs& a, Worker& w) {
    const AttentionSchedule& schedule = *a.schedule;
    const int d = a.cache->head_dim;
    Tile<T> tile;
    tile.args = &a;
    tile.head_dim = d;
    tile.unit_rows = 0;
    char* memory = w.scratch;
    auto take = [&](std::size_t bytes) {
        char* p = memory;
        memory += (bytes + 63) / 64 * 64;
        return p;
    };
    tile.score = reinterpret_cast<float*>(take(sizeof(float) * kTileRows * kScoreStride));
    tile.p = reinterpret_cast<T*>(take(sizeof(T) * kTileRows * kProbStride));
    tile.q = reinterpret_cast<T*>(take(sizeof(T) * kTileRows * d));
    tile.out = reinterpret_cast<float*>(take(sizeof(float) * kTileRows * d));
    tile.spare = memory;
    Lists lists;
    Turns turns(w, schedule.num_turns, 1);
    for (int turn, turn_end; turns.next(turn, turn_end);) {
        const int end = schedule.part_begin[turn_end];
        for (int n = schedule.part_begin[turn]; n < end; n++) {
            const int next_turn = turns.ahead();
            const int after = n + 1 < end ? n + 1 : next_turn < schedule.num_turns ? schedule.part_begin[next_turn] : -1;
            run_part(tile, n, after, lists);
        }
    }
    if (schedule.num_cuts == 0) return;
    w.barrier();
    for (int i = w.id; i < schedule.num_cuts; i += w.count) {
        merge_cut(tile, schedule.cuts[i]);
    }
}

void attention(const AttentionArgs& a, Worker& w) {
    if (a.cache->dtype == DType::f32) {
        attention_of<float>(a, w);
    } else {
        attention_of<bf16>(a, w);
        if constexpr (kHasTiles) end_tiles();
    }
}

}  // namespace millstream::MS_LEVEL

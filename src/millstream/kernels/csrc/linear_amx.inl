// bf16 linear layers in the matrix unit, for any number of rows. Up to 32 rows are multiplied with a panel of 32
// columns at a time: four accumulators, two tiles of rows, two of weights. The weights' panels are tiles as they lie.

#include "tiles.h"

namespace millstream::MS_LEVEL {

constexpr int kPassRows = 2 * kUnitRows;
constexpr std::size_t kNearBytes = 1 << 20;  // of x that one panel after the other uses: they stay in the second cache

template <bool kTwo>
MS_INLINE void multiply_step(const bf16* x0, const bf16* x1, std::ptrdiff_t x_bytes, const std::uint32_t* panel) {
    load_tile<6>(panel, 4 * kPanel);
    load_tile<4>(x0, x_bytes);
    dot_tiles<0, 4, 6>();
    load_tile<7>(panel + kLanes, 4 * kPanel);
    dot_tiles<1, 4, 7>();
    if constexpr (kTwo) {
        load_tile<5>(x1, x_bytes);
        dot_tiles<2, 5, 6>();
        dot_tiles<3, 5, 7>();
    }
}

// The last inputs where their number is no multiple of 32: copies with zeros behind.
template <bool kTwo>
[[gnu::noinline]] void multiply_rest(const bf16* x0, const bf16* x1, std::ptrdiff_t stride, int num_rows,
                                     int num_inputs, const std::uint32_t* panel) {
    alignas(64) bf16 x[2][kUnitRows][kUnitInputs] = {};
    alignas(64) std::uint32_t weights[kUnitPairs][kPanel] = {};
    for (int i = 0; i < num_rows; i++) {
        __builtin_memcpy(x[0][i], x0 + i * stride, sizeof(bf16) * num_inputs);
        if (kTwo) __builtin_memcpy(x[1][i], x1 + i * stride, sizeof(bf16) * num_inputs);
    }
    __builtin_memcpy(weights, panel, sizeof weights[0] * ((num_inputs + 1) / 2));
    multiply_step<kTwo>(x[0][0], x[1][0], sizeof x[0][0], weights[0]);
}

// `num_rows` rows from x, their last 16 apart where kTwo, times a panel, to c. The two may overlap, with the same bits.
template <bool kTwo>
MS_INLINE void multiply_pass(const LinearArgs& a, const bf16* x, int num_rows, int unit_rows,
                             const std::uint32_t* panel, Ahead ahead, float* c) {
    const int num_inputs = a.weight->num_inputs, steps = num_inputs / kUnitInputs;
    const std::ptrdiff_t stride = a.x_stride, second = num_rows - unit_rows;
    const bf16* x1 = x + second * stride;
    const int fetched = 4 * kUnitPairs * kPanel / ahead.passes;
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (int k = 0; k < steps; k++) {
        for (int i = 0; i < fetched; i += 64) prefetch(ahead.p + k * fetched + i);
        multiply_step<kTwo>(x + k * kUnitInputs, x1 + k * kUnitInputs, sizeof(bf16) * stride,
                            panel + k * kUnitPairs * kPanel);
    }
    if (num_inputs % kUnitInputs) {
        multiply_rest<kTwo>(x + steps * kUnitInputs, x1 + steps * kUnitInputs, stride, unit_rows,
                            num_inputs % kUnitInputs, panel + steps * kUnitPairs * kPanel);
    }
    store_tile<0>(c, 4 * kPanel);
    store_tile<1>(c + kLanes, 4 * kPanel);
    if constexpr (kTwo) {
        store_tile<2>(c + second * kPanel, 4 * kPanel);
        store_tile<3>(c + second * kPanel + kLanes, 4 * kPanel);
    }
}

void linear_tiles(const LinearArgs& a, Worker& w, Best* best) {
    constexpr int kDistance = 4096;  // bytes that one pass fetches ahead
    const int num_rows = a.num_rows, unit_rows = num_rows < kUnitRows ? num_rows : kUnitRows;
    TileShapes shapes;
    for (int i = 0; i < 6; i++) shapes.set(i, unit_rows, 64);
    for (int i = 6; i < 8; i++) shapes.set(i, kUnitPairs, 64);
    shapes.use();
    const std::size_t near = kNearBytes / (sizeof(bf16) * a.weight->num_inputs) / kPassRows * kPassRows;
    const int group = near < kPassRows ? kPassRows : near < static_cast<std::size_t>(num_rows) ? near : num_rows;
    const std::size_t panel_words = a.weight->panel_words();
    alignas(64) float c[kPassRows * kPanel];
    const int num_panels = a.weight->num_panels();
    // each panel with each group of rows, one group after the other
    Turns turns(w, (num_rows + group - 1) / group * num_panels, panels_per_turn(a, w));
    for (int begin, end; turns.next(begin, end);) {
        for (int unit = begin; unit < end; unit++) {
            const int p = unit % num_panels, first = unit / num_panels * group;
            const int last = num_rows - first < group ? num_rows : first + group;
            const int passes = (last - first + kPassRows - 1) / kPassRows;
            const std::uint32_t* panel = a.weight->words + p * panel_words;
            const char* next = panel_after(a, w, turns, unit, end);
            for (int q = 0; q < passes; q++) {
                const int row = first + q * kPassRows, n = last - row < kPassRows ? last - row : kPassRows;
                // a tile holds 16 rows if there are as many: before the last few, some are computed once more
                const int again = n < unit_rows ? unit_rows - n : 0;
                const bf16* x = static_cast<const bf16*>(a.x) + static_cast<std::ptrdiff_t>(row - again) * a.x_stride;
                Ahead ahead{next + panel_words * 4 * q / passes, passes};
                if (passes == 1 && unit != end - 1) ahead.p = reinterpret_cast<const char*>(panel) + kDistance;
                if (n > kUnitRows) {
                    multiply_pass<true>(a, x, n, unit_rows, panel, ahead, c);
                } else {
                    multiply_pass<false>(a, x, n + again, unit_rows, panel, ahead, c);
                }
                linear_finish<bf16>(a, row, n, p, c + again * kPanel, best);
            }
        }
    }
    release_tiles();
}

}  // namespace millstream::MS_LEVEL

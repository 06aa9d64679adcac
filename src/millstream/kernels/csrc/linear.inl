// Packed linear layers: y = x W^T with an epilogue on the accumulators.
//
// A thread takes whole panels of 32 output columns, so it reads one contiguous run of weights. For a panel, up to
// kLinearRows rows at a time are multiplied with it while it lies in the near caches. Each output element has one
// accumulator that takes k = 0, 1, 2, ... in order: its bits depend neither on the other rows nor on the threads.

namespace millstream::MS_LEVEL {

// Weights to fetch while a tile is computed: with one pass over the panel, two lines a step, some way ahead; with
// several, each pass fetches its part of the next panel.
struct Ahead {
    const char* p;
    int passes;
};

// Float inputs and weights, or bf16 ones in pairs.
template <class T>
struct FloatProduct {
    static constexpr int kRows = kLinearRows;
    static constexpr int kPer = 4 / sizeof(T);
    const T* x;
    std::ptrdiff_t stride;
    int num_inputs;

    template <int MR, bool kOnePass>
    [[gnu::noinline]] void tile(int row, const std::uint32_t* panel, Ahead ahead, float* c) const {
        const T* a = x + row * stride;
        const int words = num_inputs / kPer, step = 128 / ahead.passes;
        // every loop over `acc` is unrolled: with one that is not, the compiler keeps it in memory, at half the speed
        F acc[MR][2];
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) acc[i][0] = acc[i][1] = zero();
#pragma GCC unroll 2
        for (int k = 0; k < words; k++) {
            W b0 = load_words(panel + k * kPanel), b1 = load_words(panel + k * kPanel + kLanes);
            if (kOnePass) {
                prefetch(ahead.p + k * 128);
                prefetch(ahead.p + k * 128 + 64);
            } else {
                prefetch(ahead.p + k * step);
            }
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) {
                W w = spread(a + i * stride + k * kPer);
                acc[i][0] = dot(x, acc[i][0], w, b0);
                acc[i][1] = dot(x, acc[i][1], w, b1);
            }
        }
        if (kPer == 2 && num_inputs % 2 == 1) {  // an odd number of bf16 inputs: the last word has one
            W b0 = load_words(panel + words * kPanel), b1 = load_words(panel + words * kPanel + kLanes);
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) {
                W w = spread_low_half(a + i * stride + words * kPer);
                acc[i][0] = dot(x, acc[i][0], w, b0);
                acc[i][1] = dot(x, acc[i][1], w, b1);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            store(c + i * kPanel, acc[i][0]);
            store(c + i * kPanel + kLanes, acc[i][1]);
        }
    }
};

// Rows as s8 with a scale for each group of inputs, chosen from the group alone; `offset` is -128 times the group's
// sum, as weights are kept 128 too high.
struct ByteProduct {
    static constexpr int kRows = kByteRows;
    const std::int8_t* x;
    const float* scale;          // [rows][groups]
    const std::int32_t* offset;  // [rows][groups]
    int num_groups;

    template <int MR, bool kOnePass>
    [[gnu::noinline]] void tile(int row, const std::uint32_t* panel, Ahead ahead, float* c) const {
        constexpr int kLines = kByteGroupWords / kLanes;
        const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(num_groups) * kByteGroup;
        const std::int8_t* a = x + row * stride;
        F total[MR][2];
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) total[i][0] = total[i][1] = zero();
        for (int g = 0; g < num_groups; g++, panel += kByteGroupWords) {
            const char* next = ahead.p + static_cast<std::size_t>(g) * kByteGroupWords * 4 / ahead.passes;
            for (int line = 0; line < kLines / (kOnePass ? 1 : ahead.passes) + 1; line++) prefetch(next + line * 64);
            const bf16* column_scale = reinterpret_cast<const bf16*>(panel);
            const std::uint32_t* words = panel + kPanel / 2;
            const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row) * num_groups + g;
            W acc[MR][2];
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) acc[i][0] = acc[i][1] = set1_word(offset[at + i * num_groups]);
#pragma GCC unroll 8
            for (int k = 0; k < kByteGroup / 4; k++) {
                W b0 = load_words(words + k * kPanel), b1 = load_words(words + k * kPanel + kLanes);
#pragma GCC unroll 8
                for (int i = 0; i < MR; i++) {
                    W w = spread(a + i * stride + g * kByteGroup + k * 4);
                    acc[i][0] = dot_bytes(acc[i][0], b0, w);
                    acc[i][1] = dot_bytes(acc[i][1], b1, w);
                }
            }
            const F s0 = load(column_scale), s1 = load(column_scale + kLanes);
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) {
                const F s = set1(scale[at + i * num_groups]);
                total[i][0] = fma(to_floats(acc[i][0]), s * s0, total[i][0]);
                total[i][1] = fma(to_floats(acc[i][1]), s * s1, total[i][1]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            store(c + i * kPanel, total[i][0]);
            store(c + i * kPanel + kLanes, total[i][1]);
        }
    }
};

template <bool kOnePass, class Product, int MR = Product::kRows>
MS_INLINE void tile_of(int num_rows, const Product& product, int row, const std::uint32_t* panel, Ahead ahead,
                       float* c) {
    if constexpr (MR > 0) {
        if (num_rows == MR) return product.template tile<MR, kOnePass>(row, panel, ahead, c);
        tile_of<kOnePass, Product, MR - 1>(num_rows, product, row, panel, ahead, c);
    }
}

// -- epilogues: c is one row of a panel, 32 floats ---------------------------------------------------------------

struct Best {
    float value;
    std::int32_t id;
};

template <class Out, class T>
MS_INLINE void store_row(const float* c, Out* out, const T* residual, int n) {
    for (int h = 0; h < kPanel && h < n; h += kLanes) {
        F x = load(c + h);
        if (n - h >= kLanes) {
            if (residual) x = load(residual + h) + x;
            store(out + h, x);
        } else {
            if (residual) x = load(residual + h, n - h) + x;
            store(out + h, x, n - h);
        }
    }
}

MS_INLINE void best_of_row(const float* c, int column, int n, Best& best) {
    F low = set1(-__builtin_inff());
    float m = maximum(max(n >= kLanes ? load(c) : max(load(c, n), low), n >= kPanel ? load(c + kLanes) : low));
    if (n < kPanel) {  // the last panel, once: lanes without a column hold zeros
        m = -__builtin_inff();
        for (int i = 0; i < n; i++) m = c[i] > m ? c[i] : m;
    }
    if (!(m > best.value)) return;  // the lowest column wins among equals, and columns come in order
    for (int i = 0; i < n; i++) {
        if (c[i] == m) {
            best = {m, column + i};
            return;
        }
    }
}

template <class T>
MS_INLINE void linear_finish(const LinearArgs& a, int row, int num_rows, int panel, float* c, Best* best) {
    const LinearWeight& w = *a.weight;
    const int columns = w.is_gate_up ? kLanes : kPanel, first_column = panel * columns;
    const int left = w.num_outputs - first_column, n = left < columns ? left : columns;
    for (int i = 0; i < num_rows; i++, c += kPanel) {
        const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row + i) * a.out_stride + first_column;
        if (w.bias) {
            for (int h = 0; h < kPanel; h += kLanes) store(c + h, load(c + h) + load(w.bias + panel * kPanel + h));
        }
        switch (a.epilogue) {
            case Epilogue::store:
                store_row<T, T>(c, static_cast<T*>(a.out) + at, nullptr, n);
                break;
            case Epilogue::add:
                store_row(c, static_cast<T*>(a.out) + at, static_cast<const T*>(a.residual) + at, n);
                break;
            case Epilogue::silu_mul:
                store(static_cast<T*>(a.out) + at, silu<T>(load(c)) * load(c + kLanes), n);
                break;
            case Epilogue::store_f32:
                store_row<float, T>(c, static_cast<float*>(a.out) + at, nullptr, n);
                break;
            case Epilogue::argmax:
                best_of_row(c, first_column, n, best[row + i]);
                break;
        }
    }
}

// -- the whole layer ---------------------------------------------------------------------------------------------

void linear_tiles(const LinearArgs& a, Worker& w, Best* best);  // linear_amx.inl, where kHasTiles

MS_INLINE int panels_per_turn(const LinearArgs& a, const Worker& w) {
    return Turns::units_per_turn(a.weight->num_panels(), w.count);
}

MS_INLINE const char* panel_at(const LinearArgs& a, int panel) {
    return reinterpret_cast<const char*>(a.weight->words + panel * a.weight->panel_words());
}

// What the thread reads after a unit of a turn that ends at `end`: the next one's panel, or what it begins the next
// layer with, or nothing else. A unit is a panel with some of the rows.
MS_INLINE const char* panel_after(const LinearArgs& a, const Worker& w, const Turns& turns, int unit, int end) {
    const int next = unit + 1 < end ? unit + 1 : turns.ahead(), num_panels = a.weight->num_panels();
    if (next < turns.num_units()) return panel_at(a, next % num_panels);
    if (!a.next) return panel_at(a, unit % num_panels);
    const int first = w.id * panels_per_turn(*a.next, w);
    return panel_at(*a.next, first < a.next->weight->num_panels() ? first : 0);
}

template <class T, class Product>
void linear_panels(const LinearArgs& a, const Product& product, Worker& w, Best* best) {
    constexpr int kDistance = 2048;  // bytes that one pass fetches ahead; 0 to 8 KB measured alike
    const std::size_t panel_words = a.weight->panel_words();
    const int passes = (a.num_rows + Product::kRows - 1) / Product::kRows;
    const int rows = a.num_rows / passes, more = a.num_rows % passes;  // the first `more` passes take one row more
    alignas(64) float c[Product::kRows * kPanel];
    Turns turns(w, a.weight->num_panels(), panels_per_turn(a, w));
    for (int begin, end; turns.next(begin, end);) {
        for (int p = begin; p < end; p++) {
            const std::uint32_t* panel = a.weight->words + p * panel_words;
            const char* next = panel_after(a, w, turns, p, end);
            for (int q = 0, row = 0; q < passes; q++) {
                const int n = rows + (q < more);
                if (passes == 1) {
                    Ahead ahead{p == end - 1 ? next : reinterpret_cast<const char*>(panel) + kDistance, 1};
                    tile_of<true>(n, product, row, panel, ahead, c);
                } else {
                    tile_of<false>(n, product, row, panel, Ahead{next + panel_words * 4 * q / passes, passes}, c);
                }
                linear_finish<T>(a, row, n, p, c, best);
                row += n;
            }
        }
    }
}

template <class T>
MS_INLINE void quantize_row(const T* x, int width, std::int8_t* q, float* scale, std::int32_t* offset) {
    static_assert(kByteGroup == 2 * kLanes, "a group is two vectors");
    for (int k = 0; k < width; k += kByteGroup, q += kByteGroup) {
        const int n = width - k;
        const F a = n < kLanes ? load(x + k, n) : load(x + k);
        const F b = n >= kByteGroup ? load(x + k + kLanes) : n > kLanes ? load(x + k + kLanes, n - kLanes) : zero();
        float largest = maximum(max(abs(a), abs(b)));
        if (!(largest > 0.0f)) largest = 1.0f;
        const F inverse = set1(127.0f / largest);
        const W u = to_words(a * inverse), v = to_words(b * inverse);
        store_bytes(q, u);
        store_bytes(q + kLanes, v);
        *scale++ = largest / 127.0f;
        *offset++ = -128 * sum_words(add_words(u, v));
    }
}

template <class T>
MS_INLINE void linear_bytes(const LinearArgs& a, char* shared, Worker& w, Best* best) {
    const std::size_t groups = a.weight->num_groups(), rows = a.num_rows;
    float* scale = reinterpret_cast<float*>(shared);
    std::int32_t* offset = reinterpret_cast<std::int32_t*>(scale + rows * groups);
    std::int8_t* q = reinterpret_cast<std::int8_t*>(offset + rows * groups);
    int begin, end;
    w.share(a.num_rows, begin, end);
    for (std::size_t i = begin; i < static_cast<std::size_t>(end); i++) {
        quantize_row(static_cast<const T*>(a.x) + i * a.x_stride, a.weight->num_inputs, q + i * groups * kByteGroup,
                     scale + i * groups, offset + i * groups);
    }
    w.barrier();
    linear_panels<T>(a, ByteProduct{q, scale, offset, static_cast<int>(groups)}, w, best);
}

// Each thread has the best of its columns; among equals the lowest wins.
MS_INLINE void merge_best(const LinearArgs& a, Worker& w) {
    const Best* best = reinterpret_cast<const Best*>(a.shared);
    int begin, end;
    w.share(a.num_rows, begin, end);
    for (int i = begin; i < end; i++) {
        Best found = best[i];
        for (int t = 1; t < w.count; t++) {
            const Best& other = best[static_cast<std::ptrdiff_t>(t) * a.num_rows + i];
            const bool is_equal = other.value == found.value;
            if (other.value > found.value || (is_equal && other.id < found.id)) found = other;
        }
        a.ids[i] = found.id;
    }
}

template <class T>
void linear_of(const LinearArgs& a, Worker& w) {
    if (a.num_rows == 0) return;
    char* shared = a.shared;
    Best* best = nullptr;
    if (a.epilogue == Epilogue::argmax) {
        best = reinterpret_cast<Best*>(shared) + static_cast<std::ptrdiff_t>(w.id) * a.num_rows;
        for (int i = 0; i < a.num_rows; i++) best[i] = {-__builtin_inff(), 0};
        shared += sizeof(Best) * static_cast<std::size_t>(a.num_rows) * w.count;
    }
    if (a.weight->type == WeightType::int8) {
        linear_bytes<T>(a, shared, w, best);
    } else if constexpr (kHasTiles && sizeof(T) == 2) {
        linear_tiles(a, w, best);
    } else {
        const T* x = static_cast<const T*>(a.x);
        linear_panels<T>(a, FloatProduct<T>{x, a.x_stride, a.weight->num_inputs}, w, best);
    }
    if (!best) return;
    w.barrier();
    merge_best(a, w);
}

void linear(const LinearArgs& a, Worker& w) {
    if (a.dtype == DType::f32) {
        linear_of<float>(a, w);
    } else {
        linear_of<bf16>(a, w);
    }
}

}  // namespace millstream::MS_LEVEL

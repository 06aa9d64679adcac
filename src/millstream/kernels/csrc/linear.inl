// Packed linear layers: y = x W^T with an epilogue on the accumulators.
//
// A thread takes whole panels of 32 output columns, so it reads one contiguous run of weights. For a panel, up to
// kLinearRows rows at a time are multiplied with it while it lies in the near caches. Each output element has one
// accumulator that takes k = 0, 1, 2, ... in order: its bits depend neither on the other rows nor on the threads.

namespace millstream::MS_LEVEL {

// How one word of weights meets one word of activations.
template <class T>
struct FloatProduct {
    using Acc = F;
    const T* x;
    std::ptrdiff_t stride;

    static Acc start() { return zero(); }
    const void* word(int row, int k) const { return x + row * stride + k * static_cast<int>(4 / sizeof(T)); }
    static Acc dot(Acc acc, W a, W b) { return MS_LEVEL::dot(static_cast<const T*>(nullptr), acc, a, b); }
    void finish(Acc acc, int, int, float* c) const { store(c, acc); }
};

struct ByteProduct {
    using Acc = W;
    const std::int8_t* x;
    std::ptrdiff_t stride;
    const float* row_scale;
    const std::int32_t* row_offset;  // -128 * sum of the row: weights are kept as u8, 128 too high
    const float* column_scale;

    static Acc start() { return set1_word(0); }
    const void* word(int row, int k) const { return x + row * stride + k * 4; }
    static Acc dot(Acc acc, W a, W b) { return dot_bytes(acc, b, a); }
    void finish(Acc acc, int row, int column, float* c) const {
        F scale = set1(row_scale[row]) * load(column_scale + column);
        store(c, to_floats(add_words(acc, set1_word(row_offset[row]))) * scale);
    }
};

// Weights to fetch while a tile is computed: with one pass over the panel, two lines a step, some way ahead; with
// several, each pass fetches its part of the next panel.
struct Ahead {
    const char* p;
    int step;
};

template <int MR, bool kOnePass, class Product>
[[gnu::noinline]] void linear_tile(const Product& product, int row, const std::uint32_t* panel, int column, int words,
                                   bool has_half, Ahead ahead, float* c) {
    // every loop over `acc` is unrolled: with one that is not, the compiler keeps it in memory, at half the speed
    typename Product::Acc acc[MR][2];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) acc[i][0] = acc[i][1] = Product::start();
#pragma GCC unroll 2
    for (int k = 0; k < words; k++) {
        W b0 = load_words(panel + k * kPanel), b1 = load_words(panel + k * kPanel + kLanes);
        if (kOnePass) {
            prefetch_near(ahead.p + k * 128);
            prefetch_near(ahead.p + k * 128 + 64);
        } else {
            prefetch_far(ahead.p + k * ahead.step);
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            W a = spread(product.word(row + i, k));
            acc[i][0] = Product::dot(acc[i][0], a, b0);
            acc[i][1] = Product::dot(acc[i][1], a, b1);
        }
    }
    if (has_half) {  // an odd number of bf16 inputs: the last word has one
        W b0 = load_words(panel + words * kPanel), b1 = load_words(panel + words * kPanel + kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            W a = spread_low_half(product.word(row + i, words));
            acc[i][0] = Product::dot(acc[i][0], a, b0);
            acc[i][1] = Product::dot(acc[i][1], a, b1);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
        product.finish(acc[i][0], row + i, column, c + i * kPanel);
        product.finish(acc[i][1], row + i, column + kLanes, c + i * kPanel + kLanes);
    }
}

template <bool kOnePass, class Product, int MR = kLinearRows>
MS_INLINE void linear_tile_of(int num_rows, const Product& product, int row, const std::uint32_t* panel, int column,
                              int words, bool has_half, Ahead ahead, float* c) {
    if constexpr (MR > 0) {
        if (num_rows == MR) return linear_tile<MR, kOnePass>(product, row, panel, column, words, has_half, ahead, c);
        linear_tile_of<kOnePass, Product, MR - 1>(num_rows, product, row, panel, column, words, has_half, ahead, c);
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

MS_INLINE const char* first_panel(const LinearArgs& a, const Worker& w) {
    int begin, end;
    w.share(a.weight->num_panels(), begin, end);
    return reinterpret_cast<const char*>(
        a.weight->words + static_cast<std::size_t>(begin) * a.weight->words_of_column() * kPanel);
}

template <class T, class Product>
void linear_panels(const LinearArgs& a, const Product& product, bool has_half, Worker& w, Best* best) {
    constexpr int kDistance = 2048;  // bytes that one pass fetches ahead; 0 to 8 KB measured alike
    const int column_words = a.weight->words_of_column(), words = column_words - has_half;
    const std::size_t panel_words = static_cast<std::size_t>(column_words) * kPanel;
    const int passes = (a.num_rows + kLinearRows - 1) / kLinearRows;
    const int rows = a.num_rows / passes, more = a.num_rows % passes;  // the first `more` passes take one row more
    alignas(64) float c[kLinearRows * kPanel];
    int begin, end;
    w.share(a.weight->num_panels(), begin, end);
    for (int p = begin; p < end; p++) {
        const std::uint32_t* panel = a.weight->words + p * panel_words;
        const char* next = reinterpret_cast<const char*>(panel + panel_words);
        if (p == end - 1) next = a.next ? first_panel(*a.next, w) : reinterpret_cast<const char*>(panel);
        for (int q = 0, row = 0; q < passes; q++) {
            const int n = rows + (q < more);
            if (passes == 1) {
                Ahead ahead{p == end - 1 ? next : reinterpret_cast<const char*>(panel) + kDistance, 0};
                linear_tile_of<true>(n, product, row, panel, p * kPanel, words, has_half, ahead, c);
            } else {
                Ahead ahead{next + panel_words * 4 * q / passes, 128 / passes};
                linear_tile_of<false>(n, product, row, panel, p * kPanel, words, has_half, ahead, c);
            }
            linear_finish<T>(a, row, n, p, c, best);
            row += n;
        }
    }
}

// Rows as s8 with a scale each, chosen from the row alone.
template <class T>
MS_INLINE void quantize_row(const T* x, int width, std::int8_t* q, float& scale, std::int32_t& offset) {
    F m = zero();
    for (int k = 0; k < width; k += kLanes) m = max(m, abs(width - k < kLanes ? load(x + k, width - k) : load(x + k)));
    float largest = maximum(m);
    if (!(largest > 0.0f)) largest = 1.0f;
    const F inverse = set1(127.0f / largest);
    W total = set1_word(0);
    for (int k = 0; k < width; k += kLanes) {
        W v = to_words((width - k < kLanes ? load(x + k, width - k) : load(x + k)) * inverse);
        total = add_words(total, v);
        store_bytes(q + k, v);
    }
    scale = largest / 127.0f;
    offset = -128 * sum_words(total);
}

template <class T>
void linear_of(const LinearArgs& a, Worker& w) {
    if (a.num_rows == 0) return;
    const LinearWeight& weight = *a.weight;
    char* shared = a.shared;
    Best* best = nullptr;
    if (a.epilogue == Epilogue::argmax) {
        best = reinterpret_cast<Best*>(shared) + static_cast<std::ptrdiff_t>(w.id) * a.num_rows;
        for (int i = 0; i < a.num_rows; i++) best[i] = {-__builtin_inff(), 0};
        shared += sizeof(Best) * static_cast<std::size_t>(a.num_rows) * w.count;
    }
    const T* x = static_cast<const T*>(a.x);
    if (weight.type == WeightType::int8) {
        const std::ptrdiff_t stride = (weight.num_inputs + kLanes - 1) / kLanes * kLanes;
        float* scale = reinterpret_cast<float*>(shared);
        std::int32_t* offset = reinterpret_cast<std::int32_t*>(scale + a.num_rows);
        std::int8_t* q = reinterpret_cast<std::int8_t*>(offset + a.num_rows);
        int begin, end;
        w.share(a.num_rows, begin, end);
        for (int i = begin; i < end; i++) {
            quantize_row(x + static_cast<std::ptrdiff_t>(i) * a.x_stride, weight.num_inputs, q + i * stride, scale[i],
                         offset[i]);
        }
        w.barrier();
        linear_panels<T>(a, ByteProduct{q, stride, scale, offset, weight.scales}, false, w, best);
    } else {
        const bool has_half = sizeof(T) == 2 && weight.num_inputs % 2 == 1;
        linear_panels<T>(a, FloatProduct<T>{x, a.x_stride}, has_half, w, best);
    }
    if (best) {
        w.barrier();
        best = reinterpret_cast<Best*>(a.shared);
        int begin, end;
        w.share(a.num_rows, begin, end);
        for (int i = begin; i < end; i++) {
            Best found = best[i];
            for (int t = 1; t < w.count; t++) {  // threads hold ascending columns: only a greater value replaces
                const Best& other = best[static_cast<std::ptrdiff_t>(t) * a.num_rows + i];
                if (other.value > found.value) found = other;
            }
            a.ids[i] = found.id;
        }
    }
}

void linear(const LinearArgs& a, Worker& w) {
    if (a.dtype == DType::f32) {
        linear_of<float>(a, w);
    } else {
        linear_of<bf16>(a, w);
    }
}

}  // namespace millstream::MS_LEVEL

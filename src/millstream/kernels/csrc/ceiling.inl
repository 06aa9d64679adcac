// What the machine can do at best, for benchmarks/kernels.py to compare the kernels with.

namespace millstream::MS_LEVEL {

// Reads memory and does nothing else with it.
void read_memory(const void* data, std::size_t num_bytes, Worker& w) {
    const std::size_t lines = num_bytes / 256, begin = lines * w.id / w.count, end = lines * (w.id + 1) / w.count;
    const char* p = static_cast<const char*>(data) + begin * 256;
    W a = set1_word(0), b = a, c = a, d = a;
    for (std::size_t i = begin; i < end; i++, p += 256) {
        a = add_words(a, load_words(p));
        b = add_words(b, load_words(p + 64));
        c = add_words(c, load_words(p + 128));
        d = add_words(d, load_words(p + 192));
    }
    store_words(w.scratch, add_words(add_words(a, b), add_words(c, d)));
}

// Products in registers: 8 * 4 * `count` dots of 16 words, in as many chains as the linear kernel has.
template <class T>
MS_INLINE void multiply_of(int count, Worker& w) {
    constexpr int kChains = 2 * kLinearRows;
    F acc[kChains];
#pragma GCC unroll 16
    for (int i = 0; i < kChains; i++) acc[i] = set1(static_cast<float>(i));  // alike, they would be made one
    const W x = load_words(w.scratch), y = load_words(w.scratch + 64);
    for (int n = 0; n < count * 32 / kChains; n++) {
#pragma GCC unroll 16
        for (int i = 0; i < kChains; i++) acc[i] = dot(static_cast<const T*>(nullptr), acc[i], x, y);
    }
    F total = zero();
#pragma GCC unroll 16
    for (int i = 0; i < kChains; i++) total = total + acc[i];
    store(reinterpret_cast<float*>(w.scratch), total);
}

void multiply_tiles(int count, Worker& w);  // ceiling_amx.inl, where kHasTiles

void multiply(DType dtype, int count, Worker& w) {
    __builtin_memset(w.scratch, 0, 128);
    if (dtype == DType::f32) {
        multiply_of<float>(count, w);
    } else if constexpr (kHasTiles) {
        multiply_tiles(count, w);
    } else {
        multiply_of<bf16>(count, w);
    }
}

}  // namespace millstream::MS_LEVEL

// Operations on rows: RMSNorm, gathering, rotary with the write of keys and values. One row (or head) is always
// one thread's, reduced in one order.

namespace millstream::MS_LEVEL {

// 1 / sqrt(mean(x^2) + eps)
template <class T>
MS_INLINE float inverse_rms(const T* x, int width, float eps) {
    F s0 = zero(), s1 = zero();
    int i = 0;
    for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
        F a = load(x + i), b = load(x + i + kLanes);
        s0 = fma(a, a, s0);
        s1 = fma(b, b, s1);
    }
    for (; i < width; i += kLanes) {
        F a = width - i < kLanes ? load(x + i, width - i) : load(x + i);
        s0 = fma(a, a, s0);
    }
    return 1.0f / __builtin_sqrtf(sum(s0 + s1) / static_cast<float>(width) + eps);
}

template <class T>
MS_INLINE void rms_norm_row(const T* x, const T* weight, int width, float eps, T* out) {
    const F scale = set1(inverse_rms(x, width, eps));
    int i = 0;
    for (; i + kLanes <= width; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
    if (i < width) store(out + i, load(x + i, width - i) * scale * load(weight + i, width - i), width - i);
}

template <class T>
void rms_norm_of(const NormArgs& a, Worker& w) {
    int begin, end;
    w.share(a.num_rows, begin, end);
    for (std::ptrdiff_t i = begin; i < end; i++) {
        rms_norm_row(static_cast<const T*>(a.x) + i * a.width, static_cast<const T*>(a.weight), a.width, a.eps,
                     static_cast<T*>(a.out) + i * a.width);
    }
}

void rms_norm(const NormArgs& a, Worker& w) {
    if (a.dtype == DType::f32) {
        rms_norm_of<float>(a, w);
    } else {
        rms_norm_of<bf16>(a, w);
    }
}

void gather(const GatherArgs& a, Worker& w) {
    int begin, end;
    w.share(a.num_rows, begin, end);
    for (std::ptrdiff_t i = begin; i < end; i++) {
        char* out = static_cast<char*>(a.out) + i * a.row_bytes;
        const std::int32_t id = a.ids[i];
        if (id < 0 || id >= a.num_table_rows) {
            __builtin_memset(out, 0, a.row_bytes);
        } else {
            __builtin_memcpy(out, static_cast<const char*>(a.table) + id * a.row_bytes, a.row_bytes);
        }
    }
}

// -- rotary and cache --------------------------------------------------------------------------------------------

// Norm (where there is a weight) and rotation of one head. Dimension i turns with i + E/2.
template <class T>
MS_INLINE void rotate_head(const T* x, const T* norm, float eps, const float* cos_sin, int head_dim, T* out) {
    const int half = head_dim / 2;
    const F scale = set1(norm ? inverse_rms(x, head_dim, eps) : 1.0f);
    for (int i = 0; i < half; i += kLanes) {
        const int n = half - i < kLanes ? half - i : kLanes;
        F a = load(x + i, n), b = load(x + half + i, n);
        if (norm) {
            a = a * scale * load(norm + i, n);
            b = b * scale * load(norm + half + i, n);
        }
        const F c = load(cos_sin + i, n), s = load(cos_sin + half + i, n);
        store(out + i, fma(a, c, zero() - b * s), n);
        store(out + half + i, fma(b, c, a * s), n);
    }
}

// A key: its words go down a column of the block's K plane.
template <class T>
MS_INLINE void write_key(const KVCache& cache, std::uint32_t* plane, int offset, const T* key) {
    const int words = cache.head_dim * static_cast<int>(sizeof(T)) / 4;
    for (int i = 0; i < words; i++) {
        __builtin_memcpy(plane + i * cache.block_size + offset, reinterpret_cast<const char*>(key) + 4 * i, 4);
    }
}

// A value: a row of the block's V plane, or with bf16 one half of each word of the row that two tokens share.
MS_INLINE void write_value(const KVCache& cache, std::uint32_t* plane, int offset, const float* value) {
    __builtin_memcpy(plane + offset * cache.head_dim, value, sizeof(float) * cache.head_dim);
}
MS_INLINE void write_value(const KVCache& cache, std::uint32_t* plane, int offset, const bf16* value) {
    std::uint32_t* row = plane + offset / 2 * cache.head_dim;
    for (int i = 0; i < cache.head_dim; i += kLanes) store_halves(row + i, value + i, offset % 2);
}

template <class T>
void rotary_of(const RotaryArgs& a, Worker& w) {
    const KVCache& cache = *a.cache;
    const StepTables& tables = *a.tables;
    const int head_dim = cache.head_dim, num_kv_heads = cache.num_kv_heads;
    const int slots = a.num_heads + num_kv_heads, row_width = (a.num_heads + 2 * num_kv_heads) * head_dim;
    const std::size_t plane_words = cache.plane_bytes() / 4;
    alignas(64) T key[256];
    int begin, end;
    w.share(static_cast<std::int64_t>(tables.num_tokens) * slots, begin, end);
    for (int unit = begin; unit < end; unit++) {
        const std::ptrdiff_t token = unit / slots;
        const int head = unit % slots;
        int position = tables.positions[token];
        position = position < 0 ? 0 : position < a.num_positions ? position : a.num_positions - 1;
        const float* cos_sin = a.cos_sin + static_cast<std::ptrdiff_t>(position) * head_dim;
        const T* row = static_cast<const T*>(a.qkv) + token * row_width;
        const T* x = row + head * head_dim;
        if (head < a.num_heads) {
            T* q = static_cast<T*>(a.q) + (token * a.num_heads + head) * head_dim;
            rotate_head(x, static_cast<const T*>(a.q_norm), a.eps, cos_sin, head_dim, q);
            continue;
        }
        const std::int32_t slot = tables.slots[token];
        const int block = slot / cache.block_size, offset = slot % cache.block_size, kv_head = head - a.num_heads;
        if (slot < 0 || block >= cache.num_blocks) continue;  // a wrong table must not write outside the cache
        std::uint32_t* plane = static_cast<std::uint32_t*>(cache.data) +
                               (static_cast<std::size_t>(block) * num_kv_heads + kv_head) * 2 * plane_words;
        rotate_head(x, static_cast<const T*>(a.k_norm), a.eps, cos_sin, head_dim, key);
        write_key(cache, plane, offset, key);
        write_value(cache, plane + plane_words, offset, x + num_kv_heads * head_dim);
    }
}

void rotary_and_cache(const RotaryArgs& a, Worker& w) {
    if (a.cache->dtype == DType::f32) {
        rotary_of<float>(a, w);
    } else {
        rotary_of<bf16>(a, w);
    }
}

}  // namespace millstream::MS_LEVEL

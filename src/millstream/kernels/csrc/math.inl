// exp2 and what is made of it. Every lane's result depends on that lane alone, so where a value lies in a vector
// does not change its bits.

namespace millstream::MS_LEVEL {

// 2^x; 0 below -126, so that no result is subnormal (the dot instructions would flush it, others not). Polynomials
// are minimax fits of 2^f on [-1/2, 1/2] with p(0) = 1, so that 2^0 is exactly 1: relative error 1e-4 where the
// result is rounded to bf16 (2^-9) next, 2e-9 where it stays float.
template <class T>
MS_INLINE F exp2(F x) {
    F f = within_exponents(x), n = round(f), p;
    f = f - n;
    if constexpr (sizeof(T) == 2) {
        p = fma(set1(5.5008846523e-02f), f, set1(2.4221117433e-01f));
        p = fma(p, f, set1(6.9328295982e-01f));
    } else {
        p = fma(set1(1.5353371293e-04f), f, set1(1.3398877842e-03f));
        p = fma(p, f, set1(9.6184373540e-03f));
        p = fma(p, f, set1(5.5503324629e-02f));
        p = fma(p, f, set1(2.4022647913e-01f));
        p = fma(p, f, set1(6.9314720286e-01f));
    }
    p = fma(p, f, set1(1.0f));
    return if_less(x, set1(-126.0f), zero(), scale_pow2(p, n));
}

constexpr float kLog2E = 1.4426950408889634f;

template <class T>
MS_INLINE F silu(F x) {
    return x / (set1(1.0f) + exp2<T>(x * set1(-kLog2E)));
}

}  // namespace millstream::MS_LEVEL

// Passes over one row of logits, for sampling.cpp. No NaN and no +infinity are expected in a row.

namespace millstream::MS_LEVEL {

// The largest logit and the lowest column that has it.
float row_best(const float* x, int n, int* column) {
    F m0 = set1(-__builtin_inff()), m1 = m0;
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        m0 = max(m0, load(x + i));
        m1 = max(m1, load(x + i + kLanes));
    }
    float best = maximum(max(m0, m1));
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    *column = 0;
    for (int b = 0; b < n; b += kLanes) {
        if (n - b >= kLanes && maximum(load(x + b)) < best) continue;
        for (int j = b; j < n && j < b + kLanes; j++) {
            if (x[j] == best) {
                *column = j;
                return best;
            }
        }
    }
    return best;
}

// Sums of 2^((x - best) * scale) over blocks of kSumBlock; returns their total.
double row_weights(const float* x, int n, float best, float scale, double* block_sums) {
    const F b = set1(best), s = set1(scale);
    double total = 0.0;
    for (int begin = 0, block = 0; begin < n; begin += kSumBlock, block++) {
        F acc = zero();
        for (int i = begin; i < n && i < begin + kSumBlock; i += kLanes) {
            F v = exp2<float>(((n - i < kLanes ? load(x + i, n - i) : load(x + i)) - b) * s);
            if (n - i < kLanes) {
                float lanes[kLanes] = {};
                store(lanes, v, n - i);
                v = load(lanes);
            }
            acc = acc + v;
        }
        block_sums[block] = sum(acc);
        total += block_sums[block];
    }
    return total;
}

void weights_of(const float* x, int n, float best, float scale, float* weights) {
    for (int i = 0; i < n; i += kLanes) {
        const int left = n - i < kLanes ? n - i : kLanes;
        store(weights + i, exp2<float>((load(x + i, left) - set1(best)) * set1(scale)), left);
    }
}

// Maxima of n / length groups of `length` logits: group g holds g, g + groups, g + 2 groups, ...
void group_maxima(const float* x, int n, int length, float* maxima) {
    const int groups = n / length;
    for (int g = 0; g < groups; g += kLanes) {
        const int left = groups - g < kLanes ? groups - g : kLanes;
        F m = load(x + g, left);
        for (int i = 1; i < length; i++) m = max(m, load(x + static_cast<std::ptrdiff_t>(i) * groups + g, left));
        store(maxima + g, m, left);
    }
}

// The columns whose logits reach `bound`, ascending; returns how many.
int columns_from(const float* x, int n, float bound, std::int32_t* columns) {
    int count = 0;
    for (int b = 0; b < n; b += kLanes) {
        if (n - b >= kLanes && maximum(load(x + b)) < bound) continue;
        for (int j = b; j < n && j < b + kLanes; j++) {
            if (x[j] >= bound) columns[count++] = j;
        }
    }
    return count;
}

}  // namespace millstream::MS_LEVEL

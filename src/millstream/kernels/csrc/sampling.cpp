#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace millstream {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kMaxGroup = 64;

// Memory of a thread for one row.
struct RowMemory {
    std::int32_t* ids;   // [vocab] candidates
    float* logits;       // [vocab] theirs
    float* weights;      // [vocab]
    std::int32_t* order; // [vocab]
    float* maxima;       // [vocab]
    double* sums;        // [vocab / kSumBlock + 1]
};

std::size_t row_bytes(int vocab) {
    const std::size_t n = static_cast<std::size_t>(vocab);
    return (n * 20 + (n / kSumBlock + 2) * 8 + 63) / 64 * 64;
}

RowMemory memory_of(char* p, int vocab) {
    auto* sums = reinterpret_cast<double*>(p);
    auto* ids = reinterpret_cast<std::int32_t*>(sums + vocab / kSumBlock + 2);
    auto* logits = reinterpret_cast<float*>(ids + vocab);
    auto* order = reinterpret_cast<std::int32_t*>(logits + 2 * vocab);
    return {ids, logits, logits + vocab, order, reinterpret_cast<float*>(order + vocab), sums};
}

struct Row {
    const float* logits;
    int vocab;
    float best, scale;  // weight of a logit: 2^((logit - best) * scale)
    std::int32_t top_k;
    double top_p;
    float min_p;
    double number;
};

// The first index whose cumulative weight exceeds number * the sum. Weights of 0 are never picked.
int pick(const float* weights, int n, double number) {
    double total = 0.0, cumulative = 0.0;
    for (int i = 0; i < n; i++) total += weights[i];
    int last = 0;
    for (int i = 0; i < n; i++) {
        cumulative += weights[i];
        if (weights[i] > 0.0f) last = i;
        if (cumulative > number * total) return i;
    }
    return last;  // the product rounded up to the sum
}

int draw_from_all(const Row& row, const Kernels& k, const RowMemory& m) {
    double total = k.row_weights(row.logits, row.vocab, row.best, row.scale, m.sums), before = 0.0;
    const int num_blocks = (row.vocab + kSumBlock - 1) / kSumBlock;
    int block = 0;
    const double wanted = row.number * total;
    for (int last = 0; block < num_blocks; block++) {
        if (before + m.sums[block] > wanted) break;
        if (m.sums[block] > 0.0) last = block;
        before += m.sums[block];
        if (block == num_blocks - 1) {  // rounding again
            block = last;
            before -= m.sums[last];
            break;
        }
    }
    const int begin = block * kSumBlock, n = std::min(kSumBlock, row.vocab - begin);
    k.weights_of(row.logits + begin, n, row.best, row.scale, m.weights);
    int last = 0;
    for (int i = 0; i < n; i++) {
        before += m.weights[i];
        if (m.weights[i] > 0.0f) last = i;
        if (before > wanted) return begin + i;
    }
    return begin + last;
}

// A logit that at least k of them reach, near the k-th largest: the k-th largest of the maxima of groups.
float bound_of_top_k(const Row& row, const Kernels& kernels, const RowMemory& m) {
    const int k = row.top_k, length = std::max(1, std::min(kMaxGroup, row.vocab / (4 * k)));
    const int groups = row.vocab / length;
    kernels.group_maxima(row.logits, row.vocab, length, m.maxima);
    std::nth_element(m.maxima, m.maxima + (k - 1), m.maxima + groups, std::greater<float>());
    return m.maxima[k - 1];
}

// A logit below which no token can be among the likeliest that hold top_p of all weight.
float bound_of_top_p(const Row& row, const Kernels& kernels, const RowMemory& m) {
    const double total = kernels.row_weights(row.logits, row.vocab, row.best, row.scale, m.sums);
    // all tokens lighter than this together weigh less than the part that may be left out; half of it, for rounding
    const double light = 0.5 * (1.0 - row.top_p) * total / row.vocab;
    const double bound = row.best + std::log2(std::max(light, 1e-38)) / row.scale;
    return static_cast<float>(bound);
}

int draw_row(const Row& row, const Kernels& kernels, const RowMemory& m) {
    const bool has_top_k = row.top_k > 0 && row.top_k < row.vocab, has_top_p = row.top_p < 1.0;
    if (!has_top_k && !has_top_p && row.min_p <= 0.0f) return draw_from_all(row, kernels, m);
    float bound = -HUGE_VALF;
    if (has_top_k) {
        bound = bound_of_top_k(row, kernels, m);
    } else if (row.min_p > 0.0f) {  // a little lower, for rounding: the weights decide
        bound = row.best + std::log2(row.min_p * 0.999f) / row.scale;
    } else {
        bound = bound_of_top_p(row, kernels, m);
    }
    int n = kernels.columns_from(row.logits, row.vocab, bound, m.ids);
    for (int i = 0; i < n; i++) m.logits[i] = row.logits[m.ids[i]];
    kernels.weights_of(m.logits, n, row.best, row.scale, m.weights);
    int kept = 0;
    for (int i = 0; i < n; i++) {
        if (row.min_p > 0.0f && m.weights[i] < row.min_p) continue;
        m.order[kept++] = i;
    }
    // from the likeliest down, the lower id first among equals, as far as needed
    auto is_less_likely = [&](std::int32_t a, std::int32_t b) {
        return m.logits[a] != m.logits[b] ? m.logits[a] < m.logits[b] : a > b;
    };
    auto begin = m.order, end = m.order + kept;
    if (has_top_k && row.top_k < kept) {
        std::nth_element(begin, begin + (row.top_k - 1), end,
                         [&](std::int32_t a, std::int32_t b) { return is_less_likely(b, a); });
        end = begin + row.top_k;
    }
    if (has_top_p) {
        double total = 0.0, cumulative = 0.0;
        if (has_top_k || row.min_p > 0.0f) {
            for (auto i = begin; i < end; i++) total += m.weights[*i];
        } else {
            for (int b = 0; b * kSumBlock < row.vocab; b++) total += m.sums[b];
        }
        std::make_heap(begin, end, is_less_likely);
        auto rest = end;  // [rest, end) is taken
        while (rest > begin && cumulative < row.top_p * total) {
            std::pop_heap(begin, rest, is_less_likely);
            rest--;
            cumulative += m.weights[*rest];
        }
        begin = rest;
    }
    std::sort(begin, end);  // by candidate, which is by id
    n = static_cast<int>(end - begin);
    for (int i = 0; i < n; i++) {  // ascending, so nothing is overwritten before it is read
        m.ids[i] = m.ids[begin[i]];
        m.weights[i] = m.weights[begin[i]];
    }
    return m.ids[pick(m.weights, n, row.number)];
}

}  // namespace

void row_stats(const RowStatsArgs& a, Runtime& runtime) {
    char* shared = runtime.shared(row_bytes(a.vocab) * runtime.pool().size());
    runtime.pool().run([&](Worker& w) {
        const RowMemory m = memory_of(shared + row_bytes(a.vocab) * w.id, a.vocab);
        int begin, end;
        w.share(a.num_rows, begin, end);
        for (int r = begin; r < end; r++) {
            const float* x = a.logits + static_cast<std::ptrdiff_t>(r) * a.vocab;
            a.best[r] = runtime.kernels().row_best(x, a.vocab, &a.ids[r]);
            a.log_sum[r] = a.best[r] + std::log(runtime.kernels().row_weights(x, a.vocab, a.best[r], kLog2E, m.sums));
        }
    });
}

void draw(const DrawArgs& a, Runtime& runtime) {
    char* shared = runtime.shared(row_bytes(a.vocab) * runtime.pool().size());
    runtime.pool().run([&](Worker& w) {
        const RowMemory m = memory_of(shared + row_bytes(a.vocab) * w.id, a.vocab);
        int begin, end;
        w.share(a.num_rows, begin, end);
        for (int r = begin; r < end; r++) {
            Row row{a.logits + static_cast<std::ptrdiff_t>(r) * a.vocab, a.vocab, 0.0f, kLog2E / a.temperature[r],
                    a.top_k[r], a.top_p[r], a.min_p[r], a.number[r]};
            int id;
            row.best = runtime.kernels().row_best(row.logits, row.vocab, &id);
            a.ids[r] = std::isfinite(row.best) ? draw_row(row, runtime.kernels(), m) : -1;
        }
    });
}

}  // namespace millstream

// From rows of logits to tokens. A row is handled by one thread, in an order that nothing else decides.
#pragma once

#include "runtime.h"

namespace millstream {

struct RowStatsArgs {
    int num_rows, vocab;
    const float* logits;  // [rows][vocab], like all below without NaN or +infinity
    // results by row
    std::int32_t* ids;    // the likeliest token, the lowest among equals
    float* best;          // its logit
    double* log_sum;      // log of the sum of e^logit: logit - log_sum is a log-probability
};

void row_stats(const RowStatsArgs& args, Runtime& runtime);

// Temperature, then min_p, top_k and top_p, each on what the one before has left; then the inverse of the cumulative
// distribution over the tokens kept, in the order of their ids.
struct DrawArgs {
    int num_rows, vocab;
    const float* logits;
    const float* temperature;   // over 0
    const std::int32_t* top_k;  // 0: all
    const double* top_p;        // 1: all
    const float* min_p;         // 0: all
    const double* number;       // in [0, 1)
    std::int32_t* ids;          // result; -1 for a row without a finite largest logit
};

void draw(const DrawArgs& args, Runtime& runtime);

}  // namespace millstream

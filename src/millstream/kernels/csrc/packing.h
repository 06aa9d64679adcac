// Brings weights into the panels that linear.inl reads.
#pragma once

#include "pool.h"
#include "types.h"

namespace millstream {

struct PackArgs {
    WeightType type;       // of the packed weight; int8 quantises
    DType dtype;           // of the source
    int num_inputs, num_outputs;
    const void* weight;    // [N][K]
    const void* up;        // of a gate/up weight: its second half [N][K]; else null
    std::uint32_t* words;  // result
};

void pack(const PackArgs& args, ThreadPool& pool);

}  // namespace millstream

// The quantised blocks of GGUF tensors as floats.
#pragma once

#include <cstddef>

#include "types.h"

namespace millstream {

// Writes all values of `num_blocks` blocks of ggml's type number `type`, in order, as `dtype`. False for a type that is
// not known here.
bool dequantize(int type, DType dtype, std::size_t num_blocks, const void* data, void* out);

}  // namespace millstream

// All kernels of one level, in the namespace of the level: included by level_*.cpp after its vector type.
//
// Only functions of that namespace may be emitted here. An inline function of another header compiled with this
// level's flags could be the copy that the linker keeps for everyone, and stop older processors: so no templates of
// the standard library.

#include "pool.h"

#include "math.inl"

#include "linear.inl"

#include "rows.inl"

#include "attention.inl"

#include "sampling.inl"

#include "ceiling.inl"

#if defined(__AMX_BF16__)
#include "linear_amx.inl"

#include "attention_amx.inl"

#include "ceiling_amx.inl"
#endif

namespace millstream {

extern const Kernels MS_KERNELS{
    MS_LEVEL::linear,    MS_LEVEL::rms_norm, MS_LEVEL::gather,      MS_LEVEL::rotary_and_cache,
    MS_LEVEL::attention, MS_LEVEL::row_best, MS_LEVEL::row_weights, MS_LEVEL::weights_of,
    MS_LEVEL::group_maxima, MS_LEVEL::columns_from, MS_LEVEL::read_memory, MS_LEVEL::multiply,
};

}  // namespace millstream

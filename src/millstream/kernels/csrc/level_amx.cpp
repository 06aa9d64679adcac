// The kernels for AVX-512 with BF16 and VNNI and the matrix unit, AMX. Compiled with the flags of this level, see
// CMakeLists.txt.
#define MS_LEVEL amx
#define MS_KERNELS kKernelsAmx
#include "vec_avx512.h"

#include "level.inl"

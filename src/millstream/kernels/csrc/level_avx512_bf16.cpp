// The kernels for AVX-512 with BF16 and VNNI. Compiled with the flags of this level, see CMakeLists.txt.
#define MS_LEVEL avx512_bf16
#define MS_KERNELS kKernelsAvx512Bf16
#include "vec_avx512.h"

#include "level.inl"

#include "cpu.h"

namespace millstream {

// __builtin_cpu_supports also asks the operating system (XGETBV) whether it saves the wide registers.
Level best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Level::portable;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
        return Level::avx2;
    }
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return Level::avx512;
    return Level::avx512_bf16;
#else
    return Level::portable;
#endif
}

}  // namespace millstream

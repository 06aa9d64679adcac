// Which instruction sets this processor has.
#pragma once

namespace millstream {

// Ascending: a processor that has a level has those below it. Numbers are those of `native.LEVELS` in Python.
enum class Level : int { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4 };

constexpr int kNumLevels = 5;
constexpr const char* kLevelNames[kNumLevels] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};

// Where the processor has AMX, asks the system once to let this process use it: if it refuses, the level below is best.
Level best_level();

}  // namespace millstream

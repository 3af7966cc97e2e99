// x86-64 level (System V ABI, "microarchitecture levels") that the compiler may use throughout this
// build.
#pragma once

namespace tandem {

constexpr const char* kIsaLevel =
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512CD__) && \
    defined(__AVX512DQ__) && defined(__AVX512VL__)
    "x86-64-v4";
#elif defined(__AVX2__) && defined(__BMI__) && defined(__BMI2__) && defined(__F16C__) && \
    defined(__FMA__) && defined(__LZCNT__) && defined(__MOVBE__)
    "x86-64-v3";
#elif defined(__SSE4_2__) && defined(__SSSE3__) && defined(__POPCNT__)
    "x86-64-v2";
#elif defined(__x86_64__)
    "x86-64";
#elif defined(__aarch64__)
    "aarch64";
#else
    "of an unknown processor";
#endif

}  // namespace tandem

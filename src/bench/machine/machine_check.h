// Checks of one rank's arithmetic and memory on its CPU threads or GPU, with values that are known
// bit for bit, and their speed.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/exec.h"

namespace tandem {

/// Fault that a diagnosis makes in order to be seen to find it.
enum class CheckFault : uint8_t { none, gemm, memory, message };

struct MachineCheck {
  int64_t gemm_rows = 512;          ///< M, N and K of the products
  size_t memory_bytes = 64u << 20;  ///< that patterns are written to
  double seconds = 0.4;             ///< min time of the products of each dtype, and of the copies
  CheckFault fault = CheckFault::none;
};

struct MachineHealth {
  double f32_gflops = 0, bf16_gflops = 0;  ///< of the fastest product
  double copy_gbps = 0;                    ///< bytes written by the fastest copy
  std::string fault;                       ///< wrong bits: "3 of 262144 values of a bf16 product"
};

/// Multiplies matrices of small integers, whose products and sums are exact in f32 whatever their
/// order, so every element is compared with integer arithmetic. Then writes patterns to all of the
/// memory before it reads them back, and copies one half to the other. Ends at the first fault.
MachineHealth check_machine(const Exec& exec, const MachineCheck& check);

/// Fills `words` with values that depend on `seed` and on their positions from `first` on.
void fill_pattern(std::span<uint64_t> words, uint64_t seed, uint64_t first = 0);
/// Number of bytes that differ from that pattern.
size_t count_wrong_bytes(std::span<const uint64_t> words, uint64_t seed, uint64_t first = 0);

}  // namespace tandem

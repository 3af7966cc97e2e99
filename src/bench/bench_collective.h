// Collectives that `tandem bench` times, without a GEMM.
#pragma once

#include <algorithm>
#include <iterator>
#include <string_view>

#include "comm/world/native.h"

namespace tandem {

struct BenchCollective {
  std::string_view name;
  NativeOp op;
  bool only_moves;         ///< results are bits of the operands
  bool takes_wire = true;  ///< has an encoded form
};

constexpr BenchCollective kBenchCollectives[] = {
    {"all_reduce", NativeOp::all_reduce, false},
    {"all_gather", NativeOp::all_gather, true},
    {"reduce_scatter", NativeOp::reduce_scatter, false},
    {"all_to_all", NativeOp::all_to_all, true},
    {"broadcast", NativeOp::broadcast, true, false}};

/// nullptr if there is none of that name.
constexpr const BenchCollective* find_collective(std::string_view name) {
  const auto* found = std::ranges::find(kBenchCollectives, name, &BenchCollective::name);
  return found == std::end(kBenchCollectives) ? nullptr : found;
}

}  // namespace tandem

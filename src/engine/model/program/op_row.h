// Makes an operation's row, with words for what GPUs refuse.
#pragma once

#include <string>

#include "engine/model/program/declaration.h"
#include "engine/model/program/frame.h"

namespace tandem::program {

/// Row of the static members that T has.
template <typename T>
constexpr OpRow make_row(const char* name) {
  OpRow row{name};
  if constexpr (requires { T::forward; }) row.forward = T::forward;
  if constexpr (requires { T::backward; }) row.backward = T::backward;
  if constexpr (requires { T::is_gemm; }) row.is_gemm = T::is_gemm;
  if constexpr (requires { T::declare; }) row.declare = T::declare;
  if constexpr (requires { T::declare_backward; }) row.declare_backward = T::declare_backward;
  if constexpr (requires { T::keys; }) row.keys = T::keys;
  if constexpr (requires { T::bytes; }) row.bytes = T::bytes;
  if constexpr (requires { T::refusal; }) row.refusal = T::refusal;
  if constexpr (requires { T::finish; }) row.finish = T::finish;
  if constexpr (requires { T::cpu_only; }) row.cpu_only = T::cpu_only;
  if constexpr (requires { T::needs_cpu; }) row.needs_cpu = T::needs_cpu;
  return row;
}

/// "model.ffn = 100: expected a multiple of 8 on GPUs", or empty if it is one. Rows of every GEMM
/// operand are multiples of 16 bytes.
std::string refuse_unless_multiple(const char* key, int64_t value, int64_t unit);
std::string refuse_above(const char* key, int64_t value, int64_t max);

}  // namespace tandem::program

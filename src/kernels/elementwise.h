// Residual adds and dtype casts.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/exec.h"

namespace tandem {

/// out = x + y, all [rows, columns]; x and out f32, y f32 or bf16. out may be x.
void add(const Exec& exec, const Tensor& x, const Tensor& y, const Tensor& out);
/// Max terms of a sum on a GPU: their addresses are arguments of one kernel.
constexpr size_t kMaxGpuSumTerms = 4000;
/// out = terms[0] + terms[1] + …, in this order and in f32; vectors of one length and dtype, f32 or
/// bf16, at least one; on a GPU at most kMaxGpuSumTerms. out may be one of the terms.
void sum(const Exec& exec, std::span<const Tensor> terms, const Tensor& out);
/// to = from, each f32 or bf16, contiguous or both matrices of contiguous rows; rounds to nearest
/// even.
void cast(const Exec& exec, const Tensor& from, const Tensor& to);
/// Values of a contiguous f32 or bf16 tensor on exec's device, on the host.
std::vector<float> read_f32(const Exec& exec, const Tensor& values);

}  // namespace tandem

// Argument checks shared by the operators. All throw InvalidArgument with one line that names the
// operator, the operand, its value and the expected one.
#pragma once

#include <cstdint>
#include <string_view>

#include "tandem/communicator.h"
#include "tandem/norm.h"
#include "tandem/tensor.h"
#include "tune/op_desc.h"

namespace tandem {

/// Requires nonnegative extents and matrices of at most 2^48 elements: bytes and ranks still fit in
/// addition.
void check_extents(std::string_view op, int64_t m, int64_t n, int64_t k);
/// Throws InvalidArgument unless M, N and K are at most 2^30, as kernels and NCCL count in int.
void check_gpu_extents(std::string_view op, int64_t m, int64_t n, int64_t k);
/// CPU ranks: checks extents, dtypes and what e4m3 does not support.
void check_shape(const OpDesc& desc);

/// Requires `tensor` to be a CPU matrix [rows, columns] of `dtype` (or of `other`), each row dense.
void check_rows(std::string_view op, std::string_view operand, const Tensor& tensor, int64_t rows,
                int64_t columns, DType dtype, DType other);
/// As check_rows, but either dimension may be the dense one.
void check_matrix(std::string_view op, std::string_view operand, const Tensor& tensor, int64_t rows,
                  int64_t columns, DType dtype);
/// Requires `tensor` to be a contiguous CPU vector.
void check_vector(std::string_view op, std::string_view operand, const Tensor& tensor,
                  int64_t columns, DType dtype);

/// Requires `given` if and only if `expected`, with a usable eps.
void check_add_norm(std::string_view op, bool expected, const AddNorm* given);
/// Requires scales if and only if the dtype is e4m3, f32, contiguous CPU vectors: [1] or [rows].
void check_scales(const OpDesc& desc, const Scales* given);
/// Requires a bias if and only if the shape has one.
void check_bias(std::string_view op, bool expected, const Tensor* given);
/// Requires a [rows, columns] operand with dense columns if the shape has weight_kn, else dense
/// rows.
void check_layout(std::string_view op, std::string_view operand, const Tensor& tensor,
                  bool weight_kn);

}  // namespace tandem

// Argument checks that the operators share. All throw InvalidArgument with one line that names the
// operator, the operand, what it is and what was expected.
#pragma once

#include <cstdint>
#include <string_view>

#include "tandem/communicator.h"
#include "tandem/norm.h"
#include "tandem/tensor.h"

namespace tandem {

/// None negative, and no matrix of more than 2^48 elements: bytes and ranks still fit beside it.
void check_extents(std::string_view op, int64_t m, int64_t n, int64_t k);
/// What kernels and NCCL count in int: throws InvalidArgument unless M, N and K are
/// at most 2^30.
void check_gpu_extents(std::string_view op, int64_t m, int64_t n, int64_t k);
/// CPU ranks: extents and dtype.
void check_shape(std::string_view op, int64_t m, int64_t n, int64_t k, DType dtype);

/// `tensor` is a CPU matrix [rows, columns] of `dtype` (or of `other`), each row dense.
void check_rows(std::string_view op, std::string_view operand, const Tensor& tensor, int64_t rows,
                int64_t columns, DType dtype, DType other);
/// The same, but either dimension may be the dense one.
void check_matrix(std::string_view op, std::string_view operand, const Tensor& tensor, int64_t rows,
                  int64_t columns, DType dtype);
/// `tensor` is a contiguous CPU vector.
void check_vector(std::string_view op, std::string_view operand, const Tensor& tensor,
                  int64_t columns, DType dtype);

/// `given` is there exactly if `expected`, and its eps can be used.
void check_add_norm(std::string_view op, bool expected, const AddNorm* given);
/// A bias is there exactly if the shape says so.
void check_bias(std::string_view op, bool expected, const Tensor* given);
/// A [rows, columns] operand has dense columns if the shape says weight_kn, else dense rows.
void check_layout(std::string_view op, std::string_view operand, const Tensor& tensor,
                  bool weight_kn);

}  // namespace tandem

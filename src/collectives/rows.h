// Tensors as rows of dimension 0.
#pragma once

#include "core/operands.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem::collectives {

/// Bytes of one row: everything but dimension 0.
size_t row_bytes(const Tensor& tensor);

/// Throws InvalidArgument unless `a` and `b` differ in nothing but the size of dimension 0.
void require_same_rows(const char* op, const Tensor& a, const Tensor& b);

/// Throws InvalidArgument unless `shard` is this rank's share of the rows of `whole`.
void require_shard(const char* op, const Communicator& comm, const Tensor& shard,
                   const Tensor& whole);

/// Throws InvalidArgument when `shard` shares memory with `whole` other than as this rank's rows of
/// it.
void require_place(const char* op, const Communicator& comm, const Tensor& shard,
                   const Operand& whole);

}  // namespace tandem::collectives

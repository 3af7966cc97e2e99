// Tensors viewed as rows of dimension 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/operands.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem::collectives {

/// Bytes of one row: everything but dimension 0.
size_t row_bytes(const Tensor& tensor);

/// Throws InvalidArgument unless `a` and `b` only differ in the size of dimension 0.
void require_same_rows(const char* op, const Tensor& a, const Tensor& b);

/// Throws InvalidArgument unless `shard` has the shape of this rank's rows of `whole`.
void require_shard(const char* op, const Communicator& comm, const Tensor& shard,
                   const Tensor& whole);

/// Throws InvalidArgument if `shard` shares memory with `whole` other than as this rank's rows.
void require_shard_position(const char* op, const Communicator& comm, const Tensor& shard,
                            const Operand& whole);

/// Calls each(rank, rows of `send` for that rank, rows of `recv` from it), for an all-to-all.
template <typename Each>
void for_each_pair(const Tensor& send, std::span<const int64_t> send_counts, const Tensor& recv,
                   std::span<const int64_t> recv_counts, const Each& each) {
  int64_t sent = 0, received = 0;
  for (size_t r = 0; r < send_counts.size(); ++r) {
    each(int(r), send.rows(sent, send_counts[r]), recv.rows(received, recv_counts[r]));
    sent += send_counts[r];
    received += recv_counts[r];
  }
}

}  // namespace tandem::collectives

// Collectives on contiguous tensors, on any transport. Sums run in fixed rank order with f32
// accumulation, so every rank holds bitwise the same result on every run.
//
// All are collective; CPU ranks block, GPU ranks enqueue on the communicator's stream. If CPU ranks
// pass different arguments, every rank throws Mismatch. If a rank never arrives, the others throw
// Timeout, which names it. Invalid operands throw InvalidArgument before anything is sent. After
// any other error results may differ between ranks, and later calls throw Aborted on that rank.
// Zero elements are valid. Outputs must be writable and overlap no other operand, except as stated
// below. What NCCL sums, and which first calls allocate: docs/reference/operators.md.
#pragma once

#include <cstdint>
#include <span>

#include "tandem/codec.h"
#include "tandem/communicator.h"
#include "tandem/export.h"
#include "tandem/tensor.h"

TANDEM_API_BEGIN
namespace tandem {

/// Shard of `total` elements that `rank` of `world` holds: sizes differ by at most one, larger
/// shards first.
struct Shard {
  int64_t begin = 0, count = 0;
};
constexpr Shard shard_of(int64_t total, int world, int rank) {
  const int64_t base = total / world, extra = total % world;
  return {rank * base + (rank < extra ? rank : extra), base + (rank < extra ? 1 : 0)};
}

enum class ReduceOp : uint8_t { sum, max };

/// In-place reduction of `data`: f32, bf16, f16 or i32.
void all_reduce(Communicator& comm, const Tensor& data, ReduceOp op = ReduceOp::sum);
/// Sum over a wire format (Flash Communication, arXiv 2412.04964, section 3). Every rank holds the
/// same bits. A value is encoded twice: by its rank, and as an element of the sum, whose owner
/// keeps the decoded values it sent. On two ranks, or if the data fits a message of 4 KiB, each
/// rank encodes once. Sums are in f32. An exact wire gives the bits of the uncompressed all-reduce;
/// a single rank encodes nothing. Dtypes: f32, bf16 or f16 (lossless: f32 or bf16).
///
/// `residual` is error feedback: f32, as many elements as `data`, zero before the first call and
/// not modified by the caller between calls of one shape. This rank's encoding error is added to
/// the next call's values.
void all_reduce(Communicator& comm, const Tensor& data, const Wire& wire,
                const Tensor* residual = nullptr);
/// `out` [M, ...]: rank r's `shard` at rows shard_of(M, size, r). `shard` may alias its rows of
/// `out`.
void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out);
/// `shard` = rows shard_of(M, size, rank) of the sum over ranks of `data` [M, ...]. `shard` may
/// alias those rows of `data`; only they change then.
void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard,
                    ReduceOp op = ReduceOp::sum);
/// Exchanges rows: `send` is ordered by destination, `recv` by source; counts[r] = rows to / from
/// rank r. Throws Mismatch on every rank if a send count differs from the peer's receive count.
void all_to_all(Communicator& comm, const Tensor& send, std::span<const int64_t> send_counts,
                const Tensor& recv, std::span<const int64_t> recv_counts);

/// All-gather over a wire format, with the rules of all_reduce. GPU ranks of one node accept
/// formats with groups, and lossless in all_gather and all_to_all. Every rank gets the same decoded
/// rows, including its own.
void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out, const Wire& wire);
/// Encodes each value once; this rank's own rows enter the sum uncompressed. `residual`: error
/// feedback, as many elements as `data`.
void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard, const Wire& wire,
                    const Tensor* residual = nullptr);
/// Rows that stay on their rank are copied uncompressed. On GPU ranks, counts that differ between
/// two ranks cause a Timeout.
void all_to_all(Communicator& comm, const Tensor& send, std::span<const int64_t> send_counts,
                const Tensor& recv, std::span<const int64_t> recv_counts, const Wire& wire);

/// A wire format that is used only if it is faster than none. The first call on a communicator for
/// each wire, dtype and power of two of elements times uncompressed and encoded transfers on memory
/// of its own (as `allow_uncompressed` of tandem/strategy.h does). An all-reduce on more than two
/// ranks is also timed with every contribution encoded once and sent to all ranks. All ranks use
/// the fastest, in later calls too. Every rank holds the same bits of an all-reduce or all-gather,
/// whichever is used. With TANDEM_TUNE=0, or if a candidate has no time, values are sent
/// uncompressed.
struct AllowUncompressed {
  Wire wire;
};
/// Errors and `residual` are as with a Wire. If only some ranks pass AllowUncompressed, they get
/// Mismatch, on GPUs Timeout. Uncompressed sums leave `residual` unchanged. On GPUs the first call
/// of each kind must not be captured in a graph.
void all_reduce(Communicator& comm, const Tensor& data, const AllowUncompressed& choice,
                const Tensor* residual = nullptr);
void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out,
                const AllowUncompressed& choice);
void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard,
                    const AllowUncompressed& choice, const Tensor* residual = nullptr);

/// Copies `data` of rank `root` to every rank. `data` may be read-only on the root.
void broadcast(Communicator& comm, const Tensor& data, int root);
/// Blocking point-to-point pair, matched in order per (source, destination). Not collective.
void send(Communicator& comm, const Tensor& data, int peer);
void recv(Communicator& comm, const Tensor& data, int peer);

}  // namespace tandem
TANDEM_API_END

// Plain collectives on contiguous tensors, on any transport. Sums run in fixed rank order with f32
// accumulation, so every rank holds bitwise the same result on every run.
//
// All are collective and blocking. If ranks pass different arguments, every rank throws Mismatch.
// If a rank never arrives, the others throw Timeout, which names it. Wrong operands throw before
// anything is sent. After any error but Mismatch and wrong operands the ranks' parts may be uneven,
// and later calls throw Aborted on that rank. Zero elements are valid.
//
// What is written is not read-only and overlaps no other operand, except where said below; else
// InvalidArgument names both. A tensor without elements overlaps nothing.
//
// On GPUs (a communicator of run_gpus, tandem/cuda.h) they take device tensors, enqueue on the
// communicator's stream and return. What the ranks pass is not compared. NCCL does some sums of
// f32, bf16 and f16, in its own order and rounding to the dtype on the way: all_reduce of more than
// 64 MiB on more than two GPUs or of no multiple of 16 bytes, reduce_scatter of parts of more than
// 1 MiB that are no multiples of 16 bytes, and all between nodes. The first call of each kind and
// dtype, up to 16 MiB and above, may allocate: make it before capturing a graph. Calls of one
// communicator must not overlap in time.
#pragma once

#include <cstdint>
#include <span>

#include "tandem/codec.h"
#include "tandem/communicator.h"
#include "tandem/export.h"
#include "tandem/tensor.h"

TANDEM_API_BEGIN
namespace tandem {

/// The part of `total` that `rank` of `world` holds: sizes differ by at most one, larger ones
/// first.
struct Shard {
  int64_t begin = 0, count = 0;
};
constexpr Shard shard_of(int64_t total, int world, int rank) {
  const int64_t base = total / world, extra = total % world;
  return {rank * base + (rank < extra ? rank : extra), base + (rank < extra ? 1 : 0)};
}

enum class ReduceOp : uint8_t { sum, max };

/// In place. f32, bf16, f16 or i32.
void all_reduce(Communicator& comm, const Tensor& data, ReduceOp op = ReduceOp::sum);
/// The sum over a wire format (Flash Communication, arXiv 2412.04964, section 3). Every rank holds
/// the same bits. A value is encoded twice, by its rank and as part of the sum, and the sum's owner
/// keeps what it sent. On two ranks, or if everything fits a message of 4 KiB, each rank encodes
/// once. Sums are in f32. An exact wire gives the plain all-reduce's bits; one rank encodes
/// nothing. f32, bf16 or f16 (lossless: f32 or bf16). `residual` is error feedback: f32 of as many
/// elements as `data`, zeros before the first call and left alone between calls of one shape. What
/// encoding lost on this rank is added to the next call's values.
void all_reduce(Communicator& comm, const Tensor& data, const Wire& wire,
                const Tensor* residual = nullptr);
/// `out` rows: rank r's `shard` at rows shard_of(M, size, r), M = out.dim(0). `shard` may be its
/// place in `out`.
void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out);
/// `shard` = rows shard_of(M, size, rank) of the sum over ranks of `data` [M, ...]. `shard`
/// may be those rows of `data`, the only ones that then change.
void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard,
                    ReduceOp op = ReduceOp::sum);
/// Rows of `send` by destination, rows of `recv` by source. counts[r] = rows to / from rank r.
/// Throws Mismatch on every rank when one's send count differs from its peer's receive count.
void all_to_all(Communicator& comm, const Tensor& send, std::span<const int64_t> send_counts,
                const Tensor& recv, std::span<const int64_t> recv_counts);

/// Over a wire format, with the rules of all_reduce. GPU ranks of one node take the formats with
/// groups, and lossless in all_gather and all_to_all. Every rank gets the same rows, its own too as
/// the others get them.
void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out, const Wire& wire);
/// Encoded once; this rank's own rows enter the sum as they are. `residual`: error feedback, of as
/// many elements as `data`.
void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard, const Wire& wire,
                    const Tensor* residual = nullptr);
/// Rows that stay on their rank are copied as they are. On GPU ranks counts that differ between two
/// ranks end in a Timeout.
void all_to_all(Communicator& comm, const Tensor& send, std::span<const int64_t> send_counts,
                const Tensor& recv, std::span<const int64_t> recv_counts, const Wire& wire);

/// A wire format for where it is faster. The first call on a communicator for each wire, dtype and
/// power of two of elements times plain and encoded on memory of its own (as `or_plain` of
/// tandem/strategy.h does). An all-reduce on more than two ranks is also timed with every
/// contribution sent to all and encoded once. All ranks take the fastest, also in later calls. So a
/// wire that is slower than none at a size is never used there. Every rank holds the same bits of
/// an all-reduce or all-gather, whatever is taken. With TANDEM_TUNE=0, or without times for all,
/// values travel plain.
struct OrPlain {
  Wire wire;
};
/// Errors and `residual` are as with a Wire. Ranks that call with OrPlain while others do not get
/// Mismatch, on GPUs Timeout. Plain sums leave `residual` alone. On GPUs the first call for each
/// must not be captured.
void all_reduce(Communicator& comm, const Tensor& data, const OrPlain& choice,
                const Tensor* residual = nullptr);
void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out, const OrPlain& choice);
void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard,
                    const OrPlain& choice, const Tensor* residual = nullptr);

/// `data` may be read-only on the root.
void broadcast(Communicator& comm, const Tensor& data, int root);
/// Blocking pair, matched in order per (source, destination). Not collective.
void send(Communicator& comm, const Tensor& data, int peer);
void recv(Communicator& comm, const Tensor& data, int peer);

}  // namespace tandem
TANDEM_API_END

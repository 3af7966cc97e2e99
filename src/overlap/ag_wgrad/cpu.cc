#include "overlap/ag_wgrad/cpu.h"

#include "kernels/gemm.h"
#include "observe/recorder.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

namespace {

/// Products of fewer rows than this cost more in reading and writing dw than they let overlap.
constexpr int64_t kLeastRows = 256;

int wgrad_pieces(int64_t shard_rows) {
  int pieces = 1;
  while (pieces < 3 && shard_rows >> pieces >= kLeastRows) ++pieces;
  return pieces;
}

}  // namespace

AgWgradCpu::AgWgradCpu(Communicator& comm, const AgWgrad::Shape& shape)
    : rank_(comm.rank()),
      world_(comm.size()),
      shape_(shape),
      gather_(comm, "ag_wgrad", shape.m, shape.k, shape.dtype) {}

void AgWgradCpu::add(const Range& rows, const Tensor& x, const Tensor& dy, const Tensor& dw) {
  const ScopedLabel label("ag_wgrad", -1);
  gemm(dy.rows(rows.begin, rows.count).transposed(), x, dw, {nullptr, true});
}

void AgWgradCpu::run(const Plan& plan, const Tensor& x, const Tensor& dy, const Tensor& dw) {
  const Range mine = split(shape_.m, world_, rank_);
  if (world_ == 1) return add(mine, x, dy, dw);
  gather_.begin(plan, x, false);
  if (plan.overlapped) add(mine, gather_.own(), dy, dw);
  int arrived = 0;
  const auto await_until = [&](int chunk_end) {
    for (; arrived < chunk_end; ++arrived) {
      gather_.await(plan, ag_source(rank_, world_, 1 + arrived / plan.chunks),
                    arrived % plan.chunks);
    }
  };
  if (!plan.overlapped) {
    await_until((world_ - 1) * plan.chunks);
    add(mine, gather_.own(), dy, dw);
  }
  for (int step = 1; step < world_; ++step) {
    const int owner = ag_source(rank_, world_, step);
    const int pieces = wgrad_pieces(split(shape_.m, world_, owner).count);
    for (int piece = 0; piece < pieces; ++piece) {
      const Range rows = chunk_rows(shape_.m, world_, owner, pieces, piece, Taper::falling);
      const bool last = piece + 1 == pieces;
      const int in_shard =
          last ? plan.chunks
               : chunk_of_row(shape_.m, world_, plan.chunks, rows.end() - 1, Taper::falling) %
                         plan.chunks +
                     1;
      await_until((step - 1) * plan.chunks + in_shard);
      add(rows, gather_.all().rows(rows.begin, rows.count), dy, dw);
    }
  }
  gather_.end();
}

}  // namespace tandem

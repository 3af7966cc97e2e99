#include "overlap/gemm_rs/cpu.h"

#include "kernels/gemm.h"
#include "observe/recorder.h"
#include "overlap/reduce.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

GemmRsCpu::GemmRsCpu(Communicator& comm, const GemmRs::Shape& shape)
    : rank_(comm.rank()),
      world_(comm.size()),
      shape_(shape),
      line_(size_t(shape.n) * size_of(shape.dtype)),
      most_rows_(split(shape.m, comm.size(), 0).count),
      workspace_(comm, "gemm_rs", size_t(world_) * size_t(most_rows_) * line_,
                 world_ == 1 ? 0 : size_t(shape.m) * line_, world_ * kMaxChunks),
      parts_(size_t(world_)) {}

void GemmRsCpu::send(const Plan& plan, int owner, int chunk) {
  const Range rows = chunk_rows(shape_.m, world_, owner, plan.chunks, chunk, Taper::rising);
  const int64_t in_shard = rows.begin - split(shape_.m, world_, owner).begin;
  workspace_.put(owner, size_t(rank_ * most_rows_ + in_shard) * line_,
                 workspace_.scratch() + size_t(rows.begin) * line_, size_t(rows.count) * line_,
                 signal(rank_, chunk));
}

void GemmRsCpu::reduce(const Plan& plan, int chunk, const Tensor& out, const Tensor* bias) {
  const Range rows = chunk_rows(shape_.m, world_, rank_, plan.chunks, chunk, Taper::rising);
  const int64_t in_shard = rows.begin - split(shape_.m, world_, rank_).begin;
  for (int step = 0; step + 1 < world_; ++step) {
    const int source = rs_source(rank_, world_, step);
    workspace_.await(signal(source, chunk), source, chunk_id(rank_, plan.chunks, chunk));
  }
  const ScopedSpan span(SpanKind::compute, "gemm_rs", chunk_id(rank_, plan.chunks, chunk));
  for (int source = 0; source < world_; ++source) {
    parts_[size_t(source)] =
        source == rank_ ? workspace_.scratch() + size_t(rows.begin) * line_
                        : workspace_.shared() + size_t(source * most_rows_ + in_shard) * line_;
  }
  reduce_partials(parts_, shape_.dtype, bias, out.rows(in_shard, rows.count));
}

void GemmRsCpu::run(const Plan& plan, const Tensor& x, const Tensor& weight, const Tensor& out,
                    const Tensor* bias) {
  const Tensor b = weight.transposed();
  const ScopedLabel label("gemm_rs", -1);
  if (world_ == 1) return gemm(x, b, out, {bias, false});
  workspace_.begin();
  const Tensor partial(workspace_.scratch(), shape_.dtype, {shape_.m, shape_.n});
  if (!plan.overlapped) gemm(x, b, partial);
  for (int step = 0; step < world_; ++step) {
    const int owner = rs_owner(rank_, world_, step);
    for (int chunk = 0; chunk < plan.chunks; ++chunk) {
      const Range rows = chunk_rows(shape_.m, world_, owner, plan.chunks, chunk, Taper::rising);
      if (plan.overlapped) {
        const ScopedLabel tile("gemm_rs", chunk_id(owner, plan.chunks, chunk));
        gemm(x.rows(rows.begin, rows.count), b, partial.rows(rows.begin, rows.count));
      }
      if (owner != rank_) {
        send(plan, owner, chunk);
      } else {
        reduce(plan, chunk, out, bias);
      }
    }
  }
}

}  // namespace tandem

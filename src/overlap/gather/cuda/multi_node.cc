#include "overlap/gather/cuda/multi_node.h"

#include <fmt/format.h>

#include "collectives/cuda/uncompressed_nccl.h"
#include "collectives/gpu.h"
#include "kernels/cuda/add_norm.h"
#include "kernels/cuda/reduce.h"
#include "overlap/contract/cuda/gpu_operator.h"
#include "schedule/ring.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {
namespace {

// Operators that sum over ranks add the bias once, on rank 0.
GemmShape gemm_shape(const GpuCommunicator& comm, const OpDesc& s, int64_t rows) {
  const bool bias = s.bias && (s.collective == Collective::all_gather || comm.rank() == 0);
  return product_of(s, rows, bias);
}

const OpDesc& without_scales(const OpDesc& shape) {
  if (!shape.scaled() &&
      (shape.collective == Collective::all_gather || shape.result() == shape.dtype))
    return shape;
  if (!shape.scaled()) {
    throw Unsupported(fmt::format("{} across nodes: out_dtype f32 with dtype {}: expected f32",
                                  shape.op, name_of(shape.dtype)));
  }
  throw Unsupported(
      fmt::format("{} across nodes: dtype e4m3: expected f32, bf16 or f16", shape.op));
}

}  // namespace

AcrossNodes::AcrossNodes(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape)
    : comm_(comm),
      gathers_(shape.collective == Collective::all_gather),
      scatters_(shape.collective == Collective::reduce_scatter),
      sums_(shape.collective == Collective::all_reduce),
      shape_((check_shape(comm, shape.op, shape, !gathers_, gathers_), without_scales(shape))),
      whole_memory_(size_t(shape.m * (gathers_ ? shape.k : shape.n)) * size_of(shape.dtype)),
      moved_(size_t(comm.size())),
      computed_(size_t(comm.size())) {
  for (int r = 0; r <= comm.size(); ++r) {
    const int64_t rows = r < comm.size() ? shard(r).count : shape.m;
    if (shape_.gradient) {
      wgrads_.emplace_back(lt, shape, rows);
    } else if (!sums_ || r == comm.size()) {
      gemms_.emplace_back(lt, gemm_shape(comm, shape, rows));
    }
  }
  agree_on_gemm_choices(comm, lt);
  if (scatters_) {
    slots_ = DeviceMemory(size_t(shard(comm.rank()).count * shape.n * comm.size()) *
                          size_of(shape.dtype));
  }
}

std::vector<Candidate> AcrossNodes::candidates() {
  std::vector<Candidate> all{{.name = std::string(kNccl),
                              .form = Strategy::serial,
                              .run = as_call(comm_, [this](const Operands& o) { run_serial(o); })},
                             {.name = "chunked",
                              .form = Strategy::overlapped,
                              .run = as_call(comm_, [this](const Operands& o) {
                                gathers_ ? gather_chunked(o) : scatter_chunked(o);
                              })}};
  if (comm_.size() == 1) return {all[0]};
  if (sums_) all.back().refusal = "expected ranks that reach each other's memory";
  if (scatters_ && comm_.size() > kMaxPartials) {
    all.back().refusal = fmt::format("{} ranks: expected at most {}", comm_.size(), kMaxPartials);
  }
  return all;
}

Tensor AcrossNodes::gathered() const {
  return whole_memory_.view(shape_.dtype, {shape_.m, shape_.k});
}

Tensor AcrossNodes::rows_of(const DeviceMemory& memory, int64_t columns, int rank) const {
  const Shard rows = shard(rank);
  return memory.view(shape_.dtype, {shape_.m, columns}).rows(rows.begin, rows.count);
}

void AcrossNodes::run_serial(const Operands& o) {
  if (gathers_) {
    gpu::all_gather(comm_, o.x, gathered());
    return multiply(comm_.size(), gathered().data(), o, o.accumulate);
  }
  const Tensor partial = sums_ ? o.out : whole_memory_.view(shape_.dtype, {shape_.m, shape_.n});
  gemms_.back().run(o.x.data(), o.weight.data(), partial.data(), o.bias ? o.bias->data() : nullptr,
                    comm_.stream());
  if (sums_) {
    gpu::all_reduce(comm_, o.out, ReduceOp::sum);
    if (o.add_norm) launch_add_norm(o.out, *o.add_norm, o.out, comm_.stream());
    return;
  }
  gpu::reduce_scatter(comm_, partial, o.out, ReduceOp::sum);
}

void AcrossNodes::exchange(const Tensor& to_send, int to, const Tensor& to_receive, int from) {
  nccl_exchange(comm_, to_send, to, to_receive, from, side_.get());
}

void AcrossNodes::gather_chunked(const Operands& o) {
  const int rank = comm_.rank(), world = comm_.size();
  begun_.record(comm_.stream());  // the last call has read the buffers that are now written
  begun_.block(side_.get());
  for (int step = 1; step < world; ++step) {
    const int from = schedule::ag_source(rank, world, step);
    exchange(o.x, schedule::ag_target(rank, world, step), rows_of(whole_memory_, shape_.k, from),
             from);
    moved_[size_t(from)].record(side_.get());
  }
  if (shape_.keep_gathered) {
    check(cudaMemcpyAsync(rows_of(whole_memory_, shape_.k, rank).data(), o.x.data(), o.x.bytes(),
                          cudaMemcpyDefault, side_.get()),
          "copy the own shard");
    moved_[size_t(rank)].record(side_.get());
  }
  for (int step = 0; step < world; ++step) {
    const int source = schedule::ag_source(rank, world, step);
    if (step > 0) moved_[size_t(source)].block(comm_.stream());
    const void* in = step == 0 ? o.x.data() : rows_of(whole_memory_, shape_.k, source).data();
    multiply(source, in, o, step > 0 || o.accumulate);
  }
  if (shape_.keep_gathered) moved_[size_t(rank)].block(comm_.stream());
}

// Multiplies the rows of rank `source`, or all if `source` is the number of ranks, stored at `in`.
void AcrossNodes::multiply(int source, const void* in, const Operands& o, bool accumulate) {
  const Shard rows = source < comm_.size() ? shard(source) : Shard{0, shape_.m};
  if (shape_.gradient) {
    const Tensor dy = o.weight.rows(rows.begin, rows.count);
    wgrads_[size_t(source)].run(in, dy.data(), o.out.data(), accumulate, comm_.stream());
  } else {
    gemms_[size_t(source)].run(in, o.weight.data(), o.out.rows(rows.begin, rows.count).data(),
                               o.bias ? o.bias->data() : nullptr, comm_.stream());
  }
}

void AcrossNodes::scatter_chunked(const Operands& o) {
  const int rank = comm_.rank(), world = comm_.size();
  const int64_t local = shard(rank).count;
  const auto slot = [&](int source) {
    return slots_.view(shape_.dtype, {local * world, shape_.n}).rows(local * source, local);
  };
  begun_.record(comm_.stream());
  begun_.block(side_.get());
  for (int step = 0; step < world; ++step) {
    const int owner = schedule::rs_owner(rank, world, step);
    const int from = schedule::rs_source(rank, world, step);
    const Shard rows = shard(owner);
    const Tensor partial_rows = rows_of(whole_memory_, shape_.n, owner);
    gemms_[size_t(owner)].run(o.x.rows(rows.begin, rows.count).data(), o.weight.data(),
                              partial_rows.data(), o.bias ? o.bias->data() : nullptr,
                              comm_.stream());
    if (owner == rank) break;
    computed_[size_t(owner)].record(comm_.stream());
    computed_[size_t(owner)].block(side_.get());
    exchange(partial_rows, owner, slot(from), from);
  }
  moved_[0].record(side_.get());
  moved_[0].block(comm_.stream());
  Partials partials;
  partials.count = world;
  for (int r = 0; r < world; ++r) {
    partials.of[r] = r == rank ? rows_of(whole_memory_, shape_.n, rank).data() : slot(r).data();
  }
  launch_sum(partials, o.out, comm_.stream());
}

std::unique_ptr<OverlapOperator> make_across_nodes(GpuCommunicator& comm, const OpDesc& desc,
                                                   const OverlapOptions& options) {
  return std::make_unique<GpuOperator<AcrossNodes>>(comm, desc, options, nullptr);
}

}  // namespace tandem::gpu

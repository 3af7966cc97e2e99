#include "collectives/cuda/encoded_collectives.h"

#include <fmt/format.h>

#include <algorithm>

#include "codec/cuda/encode.h"
#include "tandem/collectives.h"

namespace tandem::gpu {
namespace {

constexpr size_t kSmallMessage = 4096;  // as in call.h: the CPU sends these to all

// In tiles (encoded_pipeline.cuh). Larger lags made no difference, as predicted and measured.
constexpr int kSumLag = 1, kTakeLag = 1;

template <EncodedOp op>
EncodedKernel kernel_for(const Wire& wire) {
  if (!codec::is_integer(wire.codec)) return encoded_kernel<op, Family::floats>(wire);
  if (wire.hadamard) return encoded_kernel<op, Family::rotated>(wire);
  if (wire.spikes) return encoded_kernel<op, Family::spiked>(wire);
  return wire.asymmetric ? encoded_kernel<op, Family::levels>(wire)
                         : encoded_kernel<op, Family::integers>(wire);
}
EncodedKernel kernel_for(const Wire& wire, EncodedOp op) {
  switch (op) {
    case EncodedOp::one_shot_sum:
      return kernel_for<EncodedOp::one_shot_sum>(wire);
    case EncodedOp::two_shot_sum:
      return kernel_for<EncodedOp::two_shot_sum>(wire);
    case EncodedOp::pipelined_sum:
      return kernel_for<EncodedOp::pipelined_sum>(wire);
    case EncodedOp::reduce_scatter:
      return kernel_for<EncodedOp::reduce_scatter>(wire);
    case EncodedOp::all_gather:
      break;
  }
  return kernel_for<EncodedOp::all_gather>(wire);
}

int resident_pipelines() {
  return this_share()->blocks(kMaxPipelineBlocks, kPipelinesPerSm);
}
/// True if there is more than one tile per thread block: otherwise nothing overlaps.
bool has_many_tiles(const EncodedParams& params) {
  constexpr int64_t kTile = 32 * kPipelineWorkers / kQuad;  // blocks of elements
  return params.wires[0].layout.blocks > resident_pipelines() * kTile;
}

}  // namespace

int64_t EncodedCollectives::largest_sum(int64_t elements, int ranks) {
  return ranks == 2 ? elements : shard_of(elements, ranks, 0).count;
}

EncodedCollectives::EncodedCollectives(GpuCommunicator& comm, const Wire& wire, DType dtype,
                                       int64_t largest)
    : comm_(comm), wire_(wire), dtype_(dtype), largest_(largest), calls_(sizeof(CallCounter)) {
  require_encodable_on_gpu("an encoded collective", wire, dtype);
  const size_t bytes = std::max(wire.bytes(largest, dtype), 2 * kSmallMessage);
  slot_bytes_ = (bytes + 255) / 256 * 256;
  staging_ = std::static_pointer_cast<GpuBuffer>(
      comm.allocate(4 * size_t(comm.size()) * slot_bytes_, kEncodedSignals));
}

EncodedParams EncodedCollectives::make_params(OpId op, const Tensor& in, const Tensor& out,
                                              const Tensor* residual) const {
  for (const Tensor* tensor : {&in, &out}) {
    if (tensor->dtype() == dtype_ && tensor->contiguous()) continue;
    throw InvalidArgument(fmt::format("{}: {}: expected contiguous {}", name_of(op),
                                      tensor->describe(), tandem::name_of(dtype_)));
  }
  EncodedParams params{};
  params.exchange = {staging_->table(),
                     comm_.device_deadline(),
                     in.data(),
                     out.data(),
                     0,
                     slot_bytes_,
                     reinterpret_cast<CallCounter*>(calls_.data()),
                     op,
                     comm_.link_pacer()};
  params.dtype = dtype_;
  params.residual = residual ? residual->as<float>() : nullptr;
  return params;
}

void EncodedCollectives::set_shards(EncodedParams& params, int64_t rows, int64_t row) const {
  if (const int64_t maximum = shard_of(rows, comm_.size(), 0).count * row; maximum > largest_) {
    throw InvalidArgument(fmt::format("{}: shards of {} elements: expected up to {}",
                                      name_of(params.exchange.op), maximum, largest_));
  }
  for (int r = 0; r < comm_.size(); ++r) {
    const Shard shard = shard_of(rows, comm_.size(), r);
    params.begins[r] = shard.begin * row;
    params.wires[r] = WireParams::of(wire_, shard.count * row, dtype_);
  }
}

void EncodedCollectives::launch(EncodedOp op, const EncodedParams& params, int64_t max_blocks) {
  // Thread blocks wait for the peers' blocks of the same index, so all must be resident.
  const bool pipelined = op == EncodedOp::pipelined_sum;
  const int threads = pipelined ? kPipelineThreads : kEncodedThreads;
  const int working = pipelined ? 32 * kPipelineWorkers : kEncodedThreads;
  const int resident = pipelined ? resident_pipelines() : this_share()->blocks(kMaxExchangeBlocks);
  const int64_t blocks = (max_blocks * kQuad + working - 1) / working;
  const auto grid = unsigned(std::clamp<int64_t>(blocks, 1, resident));
  const auto kernel = reinterpret_cast<const void*>(kernel_for(wire_, op));
  const Enqueueing enqueueing(comm_);
  comm_.enqueue([&] {
    EncodedParams given = params;
    void* arguments[] = {&given};
    check(
        cudaLaunchKernel(kernel, dim3(grid), dim3(unsigned(threads)), arguments, 0, comm_.stream()),
        "an encoded collective");
  });
}

void EncodedCollectives::all_reduce(const Tensor& in, const Tensor& out, const Tensor* residual,
                                    EncodedSum algorithm) {
  EncodedParams params = make_params(OpId::all_reduce, in, out, residual);
  const int64_t elements = in.elements();
  if (out.elements() != elements || largest_sum(elements, comm_.size()) > largest_) {
    throw InvalidArgument(
        fmt::format("all_reduce: {} into {}: expected as many elements in messages of up to {}",
                    in.describe(), out.describe(), largest_));
  }
  if (elements == 0) return;
  if (comm_.size() == 2 || wire_.bytes(elements, dtype_) <= kSmallMessage) {
    params.wires[0] = WireParams::of(wire_, elements, dtype_);
    return launch(EncodedOp::one_shot_sum, params, params.wires[0].layout.blocks);
  }
  set_shards(params, elements, 1);
  params.sum_lag = kSumLag, params.take_lag = kTakeLag;
  const bool pipelined =
      algorithm == EncodedSum::chosen ? has_many_tiles(params) : algorithm == EncodedSum::pipelined;
  launch(pipelined ? EncodedOp::pipelined_sum : EncodedOp::two_shot_sum, params,
         params.wires[0].layout.blocks);
}

void EncodedCollectives::reduce_scatter(const Tensor& data, const Tensor& shard,
                                        const Tensor* residual) {
  EncodedParams params = make_params(OpId::reduce_scatter, data, shard, residual);
  if (data.elements() == 0) return;
  set_shards(params, data.dim(0), data.elements() / data.dim(0));
  launch(EncodedOp::reduce_scatter, params, params.wires[0].layout.blocks);
}

void EncodedCollectives::all_gather(const Tensor& shard, const Tensor& out) {
  EncodedParams params = make_params(OpId::all_gather, shard, out, nullptr);
  if (out.elements() == 0) return;
  set_shards(params, out.dim(0), out.elements() / out.dim(0));
  launch(EncodedOp::all_gather, params, params.wires[0].layout.blocks);
}

}  // namespace tandem::gpu

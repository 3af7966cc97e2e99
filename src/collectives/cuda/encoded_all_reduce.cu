#include "collectives/cuda/encoded_all_reduce.h"

#include <algorithm>
#include <string>

#include "codec/cuda/encode.h"
#include "collectives/cuda/encoded_kernel.h"
#include "core/cuda/load_module.cuh"
#include "tandem/collectives.h"

namespace tandem::gpu {
namespace {

constexpr size_t kSmallMessage = 4096;  // of collectives/call.h: the CPU sends these to all

EncodedKernel kernel_for(const Wire& wire, bool one_shot) {
  if (!codec::is_integer(wire.codec)) return float_kernel(wire, one_shot);
  return wire.asymmetric ? level_kernel(wire, one_shot) : integer_kernel(wire, one_shot);
}

bool is_one_shot(const Wire& wire, DType dtype, int64_t elements, int ranks) {
  return ranks == 2 || wire.bytes(elements, dtype) <= kSmallMessage;
}

}  // namespace

EncodedAllReduce::EncodedAllReduce(GpuCommunicator& comm, const Wire& wire, DType dtype,
                                   int64_t max_elements)
    : comm_(comm),
      wire_(wire),
      dtype_(dtype),
      max_elements_(max_elements),
      calls_(sizeof(CallCounter)) {
  require_encodable_on_gpu("all_reduce", wire, dtype);
  const int64_t largest =
      comm.size() == 2 ? max_elements : shard_of(max_elements, comm.size(), 0).count;
  const size_t bytes = std::max(wire.bytes(largest, dtype), 2 * kSmallMessage);
  slot_bytes_ = (bytes + 255) / 256 * 256;
  staging_ = std::static_pointer_cast<GpuBuffer>(
      comm.allocate(4 * size_t(comm.size()) * slot_bytes_, 2 * kMaxGpus * kMaxExchangeBlocks));
}

void EncodedAllReduce::run(const Tensor& in, const Tensor& out, const Tensor* residual) {
  for (const Tensor* tensor : {&in, &out}) {
    if (tensor->dtype() == dtype_ && tensor->contiguous() && tensor->elements() == in.elements() &&
        tensor->elements() <= max_elements_) {
      continue;
    }
    throw InvalidArgument("all_reduce: " + tensor->describe() + ": expected contiguous " +
                          std::string(tandem::name_of(dtype_)) + " of up to " +
                          std::to_string(max_elements_) + " elements");
  }
  const int64_t elements = in.elements();
  if (elements == 0) return;
  const Enqueueing enqueueing(comm_);
  const int ranks = comm_.size();
  EncodedJob job{};
  job.exchange = {staging_->table(),
                  comm_.watch(),
                  in.data(),
                  out.data(),
                  0,
                  slot_bytes_,
                  reinterpret_cast<CallCounter*>(calls_.data()),
                  OpId::all_reduce,
                  comm_.line()};
  job.dtype = dtype_;
  job.residual = residual ? residual->as<float>() : nullptr;
  const bool one_shot = is_one_shot(wire_, dtype_, elements, ranks);
  int64_t most = 0;
  for (int r = 0; r < ranks; ++r) {
    const Shard shard = shard_of(elements, ranks, r);
    job.begins[r] = shard.begin;
    job.wires[r] = WireJob::of(wire_, one_shot ? elements : shard.count, dtype_);
    most = std::max(most, job.wires[r].parts.blocks);
  }
  // Thread blocks wait for the peers' of the same number, so that all are resident.
  const int64_t blocks = (most * kQuad + kEncodedThreads - 1) / kEncodedThreads;
  const auto grid =
      unsigned(std::clamp<int64_t>(blocks, 1, this_share()->blocks(kMaxExchangeBlocks)));
  const EncodedKernel kernel = kernel_for(wire_, one_shot);
  comm_.enqueue([&] {
    kernel<<<grid, kEncodedThreads, 0, comm_.stream()>>>(job);
    check_launch("all_reduce");
  });
}

}  // namespace tandem::gpu

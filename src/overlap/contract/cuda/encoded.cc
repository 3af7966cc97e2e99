#include "overlap/contract/cuda/encoded.h"

#include <fmt/format.h>

#include "codec/cuda/encode.h"
#include "collectives/rows/row_messages.h"
#include "kernels/cuda/add_norm.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {
namespace {

// Conditions of the fused kernels (encoded.h).
constexpr const char* kNeeds =
    "expected int8, int4 or int4:g32 of bf16, weight [N, K], no bias, K of 512 or more, M a "
    "multiple of 256 x ranks, and GPUs of compute capability 9.0 that reach their peers without an "
    "emulated link";
constexpr const char* kNeedsToGather = "; K a multiple of 128, and no keep_gathered";

bool gathers(const OpDesc& shape) {
  return shape.collective == Collective::all_gather;
}
/// Dtype of the data that is sent.
DType travelling(const OpDesc& shape) {
  return gathers(shape) ? shape.dtype : shape.result();
}
int64_t columns(const OpDesc& shape) {
  return gathers(shape) ? shape.k : shape.n;
}

OpDesc checked(GpuCommunicator& comm, const OpDesc& shape) {
  if (shape.gradient) {
    throw Unsupported(fmt::format("{}: codec '{}' on GPUs: expected ag_gemm, gemm_rs or gemm_ar",
                                  shape.op, shape.wire.describe()));
  }
  if (!comm.one_node()) {
    throw Unsupported(fmt::format("{}: codec '{}': expected GPUs that reach each other's memory",
                                  shape.op, shape.wire.describe()));
  }
  if (gathers(shape) && shape.scaled()) {
    throw Unsupported(fmt::format("{}: codec '{}' with dtype {}: expected f32, bf16 or f16",
                                  shape.op, shape.wire.describe(), name_of(shape.dtype)));
  }
  require_encodable_on_gpu(std::string(shape.op).c_str(), shape.wire, travelling(shape));
  check_shape(comm, shape.op, shape, !gathers(shape), gathers(shape));
  return shape;
}

// RS, AR: the bias is added once, by rank 0's GEMM.
GemmShape product(const GpuCommunicator& comm, const OpDesc& shape) {
  return product_of(shape, shape.m, shape.bias && (gathers(shape) || comm.rank() == 0));
}

int64_t largest_message(const GpuCommunicator& comm, const OpDesc& shape) {
  if (shape.collective == Collective::all_reduce) {
    return EncodedCollectives::largest_sum(shape.m * shape.n, comm.size());
  }
  return shard_of(shape.m, comm.size(), 0).count * columns(shape);
}

}  // namespace

EncodedDense::EncodedDense(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
                           MakeFusedEncoded make_fused)
    : comm_(comm),
      shape_(checked(comm, shape)),
      product_(lt, product(comm, shape)),
      memory_(size_t(shape.m * columns(shape)) * size_of(travelling(shape))),
      collective_(comm, shape.wire, travelling(shape), largest_message(comm, shape)) {
  agree_on_gemm_choices(comm, lt);
  if (make_fused) fused_ = make_fused(comm, shape);
}

std::vector<Candidate> EncodedDense::candidates() {
  std::vector<Candidate> all;
  const auto add = [&](const std::string& name, Strategy form, auto step) {
    all.push_back({.name = fmt::format("{} as {}", name, shape_.wire.describe()),
                   .form = form,
                   .run = as_call(comm_, std::move(step)),
                   .encoded = true});
  };
  add("serial", Strategy::serial, [this](const Operands& o) { run_serial(o); });
  if (!fused_) {
    all.push_back({.name = fmt::format("fused as {}", shape_.wire.describe()),
                   .form = Strategy::overlapped,
                   .encoded = true,
                   .refusal = fmt::format("{}{}", kNeeds, gathers(shape_) ? kNeedsToGather : "")});
    return all;
  }
  for (const Candidate& fused : fused_->candidates()) {
    add(fused.name, fused.form, [this, fused](const Operands& o) { run_fused(fused, o); });
  }
  return all;
}

int64_t EncodedDense::wire_bytes() const {
  const int64_t shard = shard_of(shape_.m, comm_.size(), 0).count * columns(shape_);
  const int64_t sums = shape_.collective == Collective::all_reduce ? 2 : 1;
  return sums * (comm_.size() - 1) * int64_t(shape_.wire.bytes(shard, travelling(shape_)));
}

void EncodedDense::run_fused(const Candidate& fused, const Operands& o) {
  if (shape_.collective != Collective::all_reduce) return fused.run(o);
  const Shard local = shard_of(shape_.m, comm_.size(), comm_.rank());
  const Tensor sums = o.out.rows(local.begin, local.count);
  fused.run({o.x, o.weight, sums});
  collective_.all_gather(sums, o.out);
  if (o.add_norm) launch_add_norm(o.out, *o.add_norm, o.out, comm_.stream());
}

void EncodedDense::run_serial(const Operands& o) {
  const auto multiply = [&](const void* in, void* to) {
    product_.run(in, o.weight.data(), to, o.bias ? o.bias->data() : nullptr, comm_.stream(),
                 pointers_of(shape_, o.scales));
  };
  if (gathers(shape_)) {
    collective_.all_gather(o.x, gathered());
    return multiply(memory_.data(), o.out.data());
  }
  multiply(o.x.data(), memory_.data());
  const Tensor partial = memory_.view(shape_.result(), {shape_.m, shape_.n});
  if (shape_.collective == Collective::reduce_scatter)
    return collective_.reduce_scatter(partial, o.out);
  collective_.all_reduce(partial, o.out);
  if (o.add_norm) launch_add_norm(o.out, *o.add_norm, o.out, comm_.stream());
}

}  // namespace tandem::gpu

#include "overlap/gemm_ar/cuda/gemm_ar.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/cuda/add_norm.h"
#include "overlap/contract/cuda/wait_ids.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {
namespace {

// The bias is added once, by rank 0's GEMM.
GemmShape gemm_shape(const GpuCommunicator& comm, const OpDesc& shape) {
  return product_of(shape, shape.m, shape.bias && comm.rank() == 0);
}

}  // namespace

GemmAr::GemmAr(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape, Strategy strategy)
    : comm_(comm),
      shape_((check_shape(comm, "gemm_ar", shape, true, false), shape)),
      whole_(lt, gemm_shape(comm, shape)),
      partial_(size_t(shape.m * shape.n) * size_of(shape.result())),
      all_reduce_(comm, shape.m * shape.n, shape.result(), shape.add_norm ? shape.n : 0,
                  kGemmArWait, AllReduce::Sizes::this_one) {
  agree_on_gemm_choices(comm, lt);
  add_serial(kNccl, AllReduceAlgorithm::nccl);
  add_serial(kOneShot, AllReduceAlgorithm::one_shot);
  add_serial(kTwoShot, AllReduceAlgorithm::two_shot);
  if (strategy != Strategy::serial) add_fused();
}

void GemmAr::add_serial(std::string_view name, AllReduceAlgorithm algorithm) {
  const int64_t elements = shape_.m * shape_.n, row = shape_.add_norm ? shape_.n : 0;
  const bool alone = comm_.size() == 1;
  if (name != kNccl && (alone || !all_reduce_.fits(elements, algorithm, row))) return;
  candidates_.push_back(
      {.name = std::string(name),
       .form = Strategy::serial,
       .run = as_call(comm_, [this, algorithm, alone](const Operands& o) {
         if (alone) {
           whole_.run(o.x.data(), o.weight.data(), o.out.data(), o.bias ? o.bias->data() : nullptr,
                      comm_.stream(), pointers_of(shape_, o.scales));
           if (o.add_norm) launch_add_norm(o.out, *o.add_norm, o.out, comm_.stream());
           return;
         }
         gemm_only(o);
         const Tensor partial = partial_.view(shape_.result(), {shape_.m, shape_.n});
         if (o.add_norm) return all_reduce_.run(partial, o.out, algorithm, *o.add_norm);
         all_reduce_.run(partial, o.out, algorithm);
       })});
}

void GemmAr::add_fused() {
  const bool bf16 = shape_.result() == DType::bf16;
  if (!has_fused_kernels(comm_) || (!bf16 && shape_.result() != DType::f16) || shape_.m < 1 ||
      shape_.m > kFusedArTokens || shape_.weight_kn) {
    candidates_.push_back({.name = "fused",
                           .form = Strategy::overlapped,
                           .refusal = "expected a GPU of compute capability 9.0 that reaches its "
                                      "peers without an emulated link, M of 1 to 256, weight "
                                      "[N, K], and a result in bf16 or f16"});
    return;
  }
  const auto make = shape_.scaled() ? (bf16 ? make_fused_ar_fp8_bf16 : make_fused_ar_fp8_f16)
                                    : (bf16 ? make_fused_ar_bf16 : make_fused_ar_f16);
  const int tokens = fused_ar_tokens(shape_.m), maximum = ArStaging::kMaxTokens;
  const int columns = int((shape_.n + ArStaging::kFeatures - 1) / ArStaging::kFeatures);
  layout_ = {comm_.size(), tokens > maximum ? columns * (tokens / maximum) : columns,
             std::min(tokens, maximum)};
  const FusedArTile tile = *std::ranges::find(kFusedArTiles, tokens, &FusedArTile::tokens);
  kernel_ = make(tile);
  // Candidates are the same on all ranks, whose K may differ.
  const double fit = kernel_->max_splits(shape_.n, shape_.k);
  const int splits = -int(comm_.slowest(std::vector<double>{-fit})[0]);
  for (int split = 1; split <= splits; ++split) {
    if (layout_.one_shot()) add_fused(tile, split, false);
    if (layout_.two_shot()) add_fused(tile, split, true);
  }
  if (splits > 1) split_partials_ = DeviceMemory(layout_.split_partial(splits - 1, 0));
  staging_ = std::static_pointer_cast<GpuBuffer>(comm_.allocate(layout_.bytes(), 0));
  calls_ = DeviceMemory(sizeof(CallCounter));
}

void GemmAr::add_fused(FusedArTile tile, int split, bool two_shot) {
  candidates_.push_back(
      {.name = fmt::format("{} tokens, cluster {}, {}{}", tile.tokens, tile.cluster,
                           split > 1 ? fmt::format("split {}, ", split) : "",
                           two_shot ? "two-shot" : "one-shot"),
       .form = Strategy::overlapped,
       .run = as_call(comm_,
                      [this, split, two_shot](const Operands& o) {
                        FusedArArgs args = fused_args(o);
                        args.split = split;
                        args.two_shot = two_shot;
                        kernel_->launch(args, comm_.stream());
                        if (!o.add_norm) return;
                        launch_add_norm(o.out, *o.add_norm, o.out, comm_.stream());
                      }),
       .family = "fused"});
}

void GemmAr::gemm_only(const Operands& o) {
  whole_.run(o.x.data(), o.weight.data(), partial_.data(), o.bias ? o.bias->data() : nullptr,
             comm_.stream(), pointers_of(shape_, o.scales));
}

// The bias is added once, to rank 0's partial product.
FusedArArgs GemmAr::fused_args(const Operands& o) const {
  return {.m = shape_.m,
          .n = shape_.n,
          .k = shape_.k,
          .x = o.x.data(),
          .weight = o.weight.data(),
          .scales = pointers_of(shape_, o.scales),
          .scaled_by_row = shape_.scaled_by_row(),
          .bias = o.bias && comm_.rank() == 0 ? o.bias->data() : nullptr,
          .out = o.out.data(),
          .staging = staging_->table(),
          .layout = layout_,
          .split_partials = split_partials_.data(),
          .split = 1,
          .calls = reinterpret_cast<CallCounter*>(calls_.data()),
          .two_shot = false,
          .deadline = comm_.device_deadline()};
}

}  // namespace tandem::gpu

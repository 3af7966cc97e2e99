#include "overlap/gemm_ar/cuda/gemm_ar.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "kernels/cuda/add_norm.h"
#include "overlap/contract/cuda/wait_ids.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {
namespace {

// The bias is added once, by rank 0's GEMM.
GemmShape gemm_shape(const GpuCommunicator& comm, const OpDesc& shape) {
  return product_of(shape, shape.m, shape.bias && comm.rank() == 0);
}

AllReduceAlgorithm all_reduce_algorithm(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::serial_nccl:
      return AllReduceAlgorithm::nccl;
    case Algorithm::one_shot:
      return AllReduceAlgorithm::one_shot;
    case Algorithm::two_shot:
      return AllReduceAlgorithm::two_shot;
    case Algorithm::automatic:
    case Algorithm::fused_cutlass:
    case Algorithm::serial_kernels:
    case Algorithm::serial_copy:
    case Algorithm::chunked:
    case Algorithm::fused:
      break;
  }
  throw InvalidArgument(fmt::format(
      "gemm_ar: algorithm {}: expected serial_nccl, one_shot, two_shot, or fused where {}",
      name_of(algorithm), "M is 1 to 256, bf16 or f16 comes out, weight [N, K]"));
}

}  // namespace

GemmAr::GemmAr(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape, Algorithm algorithm)
    : comm_(comm),
      shape_((check_shape(comm, "gemm_ar", shape, true, false), shape)),
      whole_(lt, gemm_shape(comm, shape)),
      partial_(size_t(shape.m * shape.n) * size_of(shape.result())),
      all_reduce_(comm, shape.m * shape.n, shape.result(), shape.add_norm ? shape.n : 0,
                  kGemmArWait, AllReduce::Sizes::this_one),
      algorithm_(algorithm) {
  agree_on_gemm_choices(comm, lt);
  if (prepares_fused(algorithm)) make_fused();
  if (algorithm_ != Algorithm::automatic) return;
  std::optional<AddNormScratch> tail;
  if (shape.add_norm) tail.emplace(Extent{shape.result(), shape.m, shape.n});
  algorithm_ =
      choose_algorithm(comm, "gemm_ar", shape, shape.m, shape.m, algorithms(),
                       [&](Algorithm w, const Tensor& x, const Tensor& weight, const Tensor& out,
                           const Tensor* bias, const Scales* scales) {
                         run(w, x, weight, out, bias, scales, tail ? &tail->add_norm : nullptr);
                       });
}

void GemmAr::make_fused() {
  const bool bf16 = shape_.result() == DType::bf16;
  if (!has_fused_kernels(comm_) || (!bf16 && shape_.result() != DType::f16) || shape_.m < 1 ||
      shape_.m > kFusedArTokens || shape_.weight_kn) {
    return;
  }
  const auto make = shape_.scaled() ? (bf16 ? make_fused_ar_fp8_bf16 : make_fused_ar_fp8_f16)
                                    : (bf16 ? make_fused_ar_bf16 : make_fused_ar_f16);
  const int tokens = fused_ar_tokens(shape_.m), maximum = ArStaging::kMaxTokens;
  const int columns = int((shape_.n + ArStaging::kFeatures - 1) / ArStaging::kFeatures);
  layout_ = {comm_.size(), tokens > maximum ? columns * (tokens / maximum) : columns,
             std::min(tokens, maximum)};
  for (const FusedArTile& tile : kFusedArTiles) {
    if (tile.tokens != tokens) continue;
    kernels_.push_back(make(tile));
    // Variants are the same on all ranks, whose K may differ.
    const double fit = kernels_.back()->max_splits(shape_.n, shape_.k);
    const int splits = -int(comm_.slowest(std::vector<double>{-fit})[0]);
    for (int split = 1; split <= splits; ++split) {
      for (const bool two_shot : {false, true}) {
        if (two_shot ? !layout_.two_shot() : !layout_.one_shot()) continue;
        fused_.push_back(
            {.name = fmt::format("{} tokens, cluster {}, {}{}", tile.tokens, tile.cluster,
                                 split > 1 ? fmt::format("split {}, ", split) : "",
                                 two_shot ? "two-shot" : "one-shot"),
             .form = Strategy::overlapped,
             .run = [this, &kernel = *kernels_.back(), split, two_shot](const Operands& o) {
               run_fused(kernel, split, two_shot, o);
             }});
      }
    }
    if (splits > 1) split_partials_ = DeviceMemory(layout_.split_partial(splits - 1, 0));
  }
  staging_ = std::static_pointer_cast<GpuBuffer>(comm_.allocate(layout_.bytes(), 0));
  calls_ = DeviceMemory(sizeof(CallCounter));
  std::vector<std::string> names;
  for (const Candidate& candidate : fused_) names.push_back(candidate.name);
  fused_variant_ =
      choose_fastest(comm_, "gemm_ar fused", shape_, shape_.m, shape_.m, names,
                     [this](int i, const Tensor& x, const Tensor& weight, const Tensor& out,
                            const Tensor* bias, const Scales* scales) {
                       fused_[size_t(i)].run({x, weight, out, bias, scales});
                     });
}

std::vector<Algorithm> GemmAr::algorithms() const {
  std::vector<Algorithm> all{Algorithm::serial_nccl};
  const int64_t elements = shape_.m * shape_.n, row = shape_.add_norm ? shape_.n : 0;
  if (comm_.size() > 1 && all_reduce_.fits(elements, AllReduceAlgorithm::one_shot, row)) {
    all.push_back(Algorithm::one_shot);
  }
  if (comm_.size() > 1 && all_reduce_.fits(elements, AllReduceAlgorithm::two_shot, row)) {
    all.push_back(Algorithm::two_shot);
  }
  if (comm_.size() > 1 && !fused_.empty()) all.push_back(Algorithm::fused);
  return all;
}

void GemmAr::gemm_only(const Tensor& x, const Tensor& weight, const Tensor* bias,
                       const Scales* scales) {
  whole_.run(x.data(), weight.data(), partial_.data(), bias ? bias->data() : nullptr,
             comm_.stream(), pointers_of(shape_, scales));
}

void GemmAr::run(Algorithm algorithm, const Tensor& x, const Tensor& weight, const Tensor& out,
                 const Tensor* bias, const Scales* scales, const AddNorm* add_norm) {
  comm_.check_device();
  check_operands(comm_, "gemm_ar", shape_, shape_.m, shape_.m, x, weight, out, bias, scales);
  check_add_norm_operands(comm_, "gemm_ar", shape_, add_norm);
  const Enqueueing call(comm_);
  if (algorithm == Algorithm::fused && !fused_.empty()) {
    return comm_.enqueue([&] {
      fused_[size_t(fused_variant_)].run({x, weight, out, bias, scales});
      if (add_norm) launch_add_norm(out, *add_norm, out, comm_.stream());
    });
  }
  const AllReduceAlgorithm reduce = all_reduce_algorithm(algorithm);
  if (comm_.size() == 1) {
    whole_.run(x.data(), weight.data(), out.data(), bias ? bias->data() : nullptr, comm_.stream(),
               pointers_of(shape_, scales));
    if (add_norm) launch_add_norm(out, *add_norm, out, comm_.stream());
    return;
  }
  comm_.enqueue([&] {
    gemm_only(x, weight, bias, scales);
    const Tensor partial = partial_.view(shape_.result(), {shape_.m, shape_.n});
    if (add_norm) return all_reduce_.run(partial, out, reduce, *add_norm);
    all_reduce_.run(partial, out, reduce);
  });
}

// The bias is added once, to rank 0's partial product.
void GemmAr::run_fused(FusedArKernel& kernel, int split, bool two_shot, const Operands& o) {
  kernel.launch({.m = shape_.m,
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
                 .split = split,
                 .calls = reinterpret_cast<CallCounter*>(calls_.data()),
                 .two_shot = two_shot,
                 .deadline = comm_.device_deadline()},
                comm_.stream());
}

}  // namespace tandem::gpu

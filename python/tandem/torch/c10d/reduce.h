// Reductions over ranks. Sums and maxima of f32, bf16, f16 and i32 are tandem's; others exchange
// shards and combine them in rank order with PyTorch's operators. Every rank gets the same bits.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "gpu_calls.h"
#include "world.h"

namespace tandem_c10d {

using Op = c10d::ReduceOp::RedOpType;

inline const char* name_of(Op op) {
  constexpr const char* kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",        "MAX",
                                    "BAND", "BOR", "BXOR",    "PREMUL_SUM", "UNUSED"};
  return kNames[op];
}

/// Throws ValueError for an op that the dtype does not have.
inline void check_op(const char* what, at::ScalarType type, Op op) {
  const bool is_bitwise = op == Op::BAND || op == Op::BOR || op == Op::BXOR;
  const bool is_ordered = op == Op::MIN || op == Op::MAX;
  const char* expected = nullptr;
  if (is_bitwise && !at::isIntegralType(type, true)) expected = "an integer dtype";
  if (op == Op::AVG && type == at::kBool) expected = "a number";
  if (op == Op::PREMUL_SUM && at::isIntegralType(type, true)) expected = "a floating dtype";
  if (is_ordered && at::isComplexType(type)) expected = "a real dtype";
  if (op == Op::UNUSED) expected = "an op";
  TORCH_CHECK_VALUE(!expected, what, ": ", name_of(op), " of ", toString(type), ": expected ",
                    expected ? expected : "");
}

constexpr int64_t kShardBytes = int64_t(1) << 20;  // of a rank's shard of a block

class Reducer {
 public:
  /// `encoded`: floating sums travel in the world's wire format.
  Reducer(World& world, const char* what, const c10d::ReduceOp& op)
      : world_(world), what_(what), op_(op.op_), supplement_(op.supplement_) {}

  /// In place; `flat` is contiguous.
  void all_reduce(at::Tensor& flat) const {
    if (world_.size() == 1) return scale_back(scale(flat));
    if (const auto type = dtype_of(flat)) {
      scale(flat);
      world_.all_reduce(flat.data_ptr(), flat.numel(), *type, op_of(), is_encoded(flat));
      return scale_back(flat);
    }
    require_same(flat);
    // On the CPU by blocks, whose shards stay in the cache.
    const int64_t block =
        world_.on_gpu() ? flat.numel() : world_.size() * (kShardBytes / flat.element_size());
    for (int64_t begin = 0; begin < flat.numel(); begin += block) {
      const at::Tensor slice = flat.narrow(0, begin, std::min(block, flat.numel() - begin));
      const at::Tensor shard = reduce_local_shard(slice);
      world_.all_gather(shard.data_ptr(), slice.data_ptr(), slice.numel(), slice.element_size());
    }
  }

  /// This rank's elements of the reduction; `counts`: elements of every rank.
  at::Tensor reduce_scatter(const at::Tensor& flat, const std::vector<int64_t>& counts) const {
    const int64_t local = counts[size_t(world_.rank())];
    const std::optional<TandemDType> type = dtype_of(flat);
    const bool is_sharded = counts == world_.shards(flat.numel());
    if (world_.size() == 1 || !type || !is_sharded) {
      require_same(flat);
      return reduce_shards(flat, counts);
    }
    at::Tensor shard = at::empty({local}, flat.options());
    const at::Tensor scaled = op_ == Op::PREMUL_SUM ? scale(flat.clone()) : flat;
    world_.reduce_scatter(scaled.data_ptr(), shard.data_ptr(), flat.numel(), 1, *type, op_of(),
                          is_encoded(flat));
    scale_back(shard);
    return shard;
  }

 private:
  /// The dtype, if tandem reduces it by this op.
  std::optional<TandemDType> dtype_of(const at::Tensor& x) const {
    if (op_ != Op::SUM && op_ != Op::AVG && op_ != Op::PREMUL_SUM && op_ != Op::MAX) return {};
    switch (x.scalar_type()) {
      case at::kFloat:
        return kTandemF32;
      case at::kBFloat16:
        return kTandemBf16;
      case at::kHalf:
        return kTandemF16;
      case at::kInt:
        return kTandemI32;
      default:
        return {};
    }
  }
  TandemOp op_of() const { return op_ == Op::MAX ? kTandemMax : kTandemSum; }
  bool is_encoded(const at::Tensor& x) const {
    return world_.is_encoded() && op_ != Op::MAX && x.is_floating_point();
  }

  at::Tensor scale(at::Tensor x) const {
    if (op_ != Op::PREMUL_SUM) return x;
    const auto* factor = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(supplement_.get());
    TORCH_CHECK_VALUE(factor, what_, ": PREMUL_SUM without a factor: expected one");
    if (!factor->tensor_factor.defined()) return x.mul_(factor->double_factor);
    if (x.is_cuda()) factor->tensor_factor.record_stream(current_stream(x.device()));
    return x.mul_(factor->tensor_factor);
  }
  /// Averages of integers are rounded towards zero, as NCCL's.
  void scale_back(at::Tensor x) const {
    if (op_ != Op::AVG) return;
    if (at::isIntegralType(x.scalar_type(), false)) {
      x.div_(world_.size(), "trunc");
    } else {
      x.div_(world_.size());
    }
  }

  void combine(at::Tensor& sum, const at::Tensor& x) const {
    switch (op_) {
      case Op::SUM:
      case Op::AVG:
      case Op::PREMUL_SUM:
        sum.add_(x);
        return;
      case Op::PRODUCT:
        sum.mul_(x);
        return;
      case Op::MIN:
        at::minimum_out(sum, sum, x);
        return;
      case Op::MAX:
        at::maximum_out(sum, sum, x);
        return;
      case Op::BAND:
        sum.bitwise_and_(x);
        return;
      case Op::BOR:
        sum.bitwise_or_(x);
        return;
      case Op::BXOR:
        sum.bitwise_xor_(x);
        return;
      case Op::UNUSED:
        return;
    }
  }

  /// Calls of GPU ranks do not block the host: they are not compared.
  void require_same(const at::Tensor& flat) const {
    if (world_.on_gpu()) return;
    world_.require_same(what_, std::string(toString(flat.scalar_type())) + " " + name_of(op_) +
                                   " of " + std::to_string(flat.numel()) + " elements");
  }

  /// Small floating types have no arithmetic, or round after each operation.
  static at::ScalarType sum_type(const at::Tensor& x) {
    return x.is_floating_point() && x.element_size() < 4 ? at::kFloat : x.scalar_type();
  }

  at::Tensor reduce_shards(const at::Tensor& flat, const std::vector<int64_t>& counts) const {
    const int64_t local = counts[size_t(world_.rank())];
    const at::Tensor shards = at::empty({world_.size(), local}, flat.options());
    const std::vector<int64_t> received(size_t(world_.size()), local);
    world_.all_to_all(flat.data_ptr(), counts, shards.data_ptr(), received, flat.element_size());
    at::Tensor sum = scale(shards[0].to(sum_type(flat)));
    for (int64_t rank = 1; rank < world_.size(); ++rank) {
      combine(sum, scale(shards[rank].to(sum_type(flat))));
    }
    scale_back(sum);
    return sum.to(flat.scalar_type());
  }

  /// Reduces this rank's shard of `slice` in place and returns it.
  at::Tensor reduce_local_shard(const at::Tensor& slice) const {
    const int64_t me = world_.rank(), ranks = world_.size();
    std::vector<int64_t> sent = world_.shards(slice.numel());
    const int64_t count = sent[size_t(me)];
    std::vector<int64_t> received(size_t(ranks), count);
    int64_t begin = 0;
    for (int64_t rank = 0; rank < me; ++rank) begin += sent[size_t(rank)];
    const at::Tensor local = slice.narrow(0, begin, count);
    // The rows sent are contiguous: a shard between others is copied with them.
    const bool stays = me == 0 || me == ranks - 1;
    if (stays) sent[size_t(me)] = received[size_t(me)] = 0;
    const at::Tensor from = me == 0 ? slice.narrow(0, count, slice.numel() - count) : slice;
    const at::Tensor shards = at::empty({ranks - stays, count}, slice.options());
    world_.all_to_all(from.data_ptr(), sent, shards.data_ptr(), received, slice.element_size());
    at::Tensor sum;
    for (int64_t rank = 0, row = 0; rank < ranks; ++rank) {
      const at::Tensor x = stays && rank == me ? local : shards[row++];
      const at::Tensor next = scale(x.to(sum_type(slice)));
      rank == 0 ? static_cast<void>(sum = next) : combine(sum, next);
    }
    scale_back(sum);
    if (sum.data_ptr() != local.data_ptr()) local.copy_(sum);
    return local;
  }

  World& world_;
  const char* const what_;
  const Op op_;
  const c10::intrusive_ptr<c10d::_SupplementBase> supplement_;
};

}  // namespace tandem_c10d

#include "kernels/cuda/hopper_attention.h"

#include <fmt/format.h>

#include <cmath>

#include "core/cuda/architecture.h"
#include "core/cuda/share.h"
#include "core/system/env.h"
#include "gemm/cuda/tensor_map.h"
#include "kernels/attention/simple_attention.h"
#include "kernels/cuda/rope.h"
#include "kernels/cuda/sm90/attention_kernels.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

using sm90::kForwardQueries, sm90::kKeyTile, sm90::kQueryTile;

class HopperAttention final : public FusedAttention {
 public:
  HopperAttention(const Exec& exec, const AttentionShape& shape, const RopeTable& rope,
                  const AttentionRows& rows)
      : FusedAttention(exec, rows),
        device_(exec.device),
        shape_(shape),
        rope_(rope),
        key_tiles_((shape.seq + kKeyTile - 1) / kKeyTile),
        query_tiles_((shape.seq + kQueryTile - 1) / kQueryTile),
        log_sums_(floats(padded() * shape.heads)),
        deltas_(floats(padded() * shape.heads)),
        first_keys_(floats(padded())),
        ends_(floats(shape.batch * key_tiles_)),
        dq_(floats(padded() * shape.heads * shape.head_dim)),
        added_(floats(shape.batch * shape.heads * query_tiles_ + 1)),
        ticket_(floats(1)),
        sms_(this_share()->sms()) {
    clear(exec, ticket_.view());
  }

  void forward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
               const Tensor& out, const Tensor& log_sums, const AttentionMask& mask) override {
    check_rotated(q, k);
    check_stream(exec);
    rotate(stream_, rope_, shape_.seq, Rotation::forward, q, k);
    forward_again(exec, q, k, v, out, log_sums, mask);
  }

  void forward_again(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& out, const Tensor& log_sums,
                     const AttentionMask& mask) override {
    check_stream(exec);
    const sm90::ForwardParams params{.q = map("q", q, rows_.qkv_stride, kForwardQueries),
                                     .k = map("k", k, rows_.qkv_stride, kKeyTile),
                                     .v = map("v", v, rows_.qkv_stride, kKeyTile),
                                     .mask = mask_of(mask),
                                     .out = values("out", out, rows_.out_stride),
                                     .stride = rows_.out_stride,
                                     .log_sums = values(log_sums),
                                     .ticket = ticket_.view().as<int>(),
                                     .sequences = int(shape_.batch),
                                     .seq = int(shape_.seq),
                                     .heads = int(shape_.heads),
                                     .kv_heads = int(shape_.kv_heads),
                                     .scale = scale(),
                                     .scale_log2 = scale_log2(),
                                     .sms = sms_};
    sm90::launch_forward(int(shape_.head_dim), params, stream_);
  }

  void backward(const Exec& exec, const AttentionGradients& t, const AttentionMask& mask) override {
    check_stream(exec);
    int* const added = added_.view().as<int>();
    const sm90::BackwardParams params{.q = map("q", t.q, rows_.qkv_stride, kQueryTile),
                                      .k = map("k", t.k, rows_.qkv_stride, kKeyTile),
                                      .v = map("v", t.v, rows_.qkv_stride, kKeyTile),
                                      .dout = map("dout", t.dout, rows_.out_stride, kQueryTile),
                                      .log_sums = log_sums_.view().as<float>(),
                                      .deltas = deltas_.view().as<float>(),
                                      .first_keys = first_keys_.view().as<int>(),
                                      .ends = ends_.view().as<int>(),
                                      .dq = dq_.view().as<float>(),
                                      .added = added + 1,
                                      .ticket = added,
                                      .angles = {rope_.cos(0), rope_.sin(0), int(rope_.half())},
                                      .dk = values("dk", t.dk, rows_.qkv_stride),
                                      .dv = values("dv", t.dv, rows_.qkv_stride),
                                      .stride = rows_.qkv_stride,
                                      .sequences = int(shape_.batch),
                                      .seq = int(shape_.seq),
                                      .heads = int(shape_.heads),
                                      .kv_heads = int(shape_.kv_heads),
                                      .key_tiles = int(key_tiles_),
                                      .query_tiles = int(query_tiles_),
                                      .scale = scale(),
                                      .scale_log2 = scale_log2()};
    const sm90::BackwardRows rows{.out = values("out", t.out, rows_.out_stride),
                                  .dout = values("dout", t.dout, rows_.out_stride),
                                  .stride = rows_.out_stride,
                                  .log_sums = values(t.log_sums),
                                  .dq = values("dq", t.dq, rows_.qkv_stride)};
    sm90::launch_backward(int(shape_.head_dim), params, mask_of(mask), rows, stream_);
  }

 private:
  /// Memory of 4-byte values.
  struct Values {
    Memory memory;
    Tensor view() const { return memory.view(DType::u8, {int64_t(memory.bytes())}); }
  };
  Values floats(int64_t count) const { return {Memory(size_t(count) * sizeof(float), device_)}; }
  int64_t padded() const { return shape_.batch * query_tiles_ * kQueryTile; }
  float scale() const { return float(1 / std::sqrt(double(shape_.head_dim))); }
  float scale_log2() const { return float(sm90::kLog2E / std::sqrt(double(shape_.head_dim))); }
  __nv_bfloat16* values(const char* name, const Tensor& tensor, int64_t stride) const {
    check_rows(name, tensor, stride);
    return static_cast<__nv_bfloat16*>(tensor.data());
  }
  float* values(const Tensor& log_sums) const {
    check_log_sums(log_sums);
    return log_sums.as<float>();
  }

  sm90::Mask mask_of(const AttentionMask& mask) const {
    const bool has_documents = mask.document_starts.dims() > 0;
    return {int(effective_window(shape_, mask.window)),
            has_documents ? mask.document_starts.as<const int32_t>() : nullptr};
  }
  CUtensorMap map(const char* name, const Tensor& tensor, int64_t stride, int box_rows) const {
    check_rows(name, tensor, stride);
    return map_rows(tensor.data(), tensor.dtype(), shape_.batch, shape_.seq, tensor.dim(1), stride,
                    box_rows);
  }

  Device device_;
  AttentionShape shape_;
  const RopeTable& rope_;
  int64_t key_tiles_, query_tiles_;
  Values log_sums_, deltas_, first_keys_, ends_, dq_, added_, ticket_;
  int sms_;
};

}  // namespace

std::string why_not_hopper_attention(const AttentionShape& shape, const AttentionRows& rows) {
  const std::string reason = why_simple_attention(shape, rows, {env().gpu_portable, false});
  if (!reason.empty()) return reason;
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    return fmt::format("head_dim {}: Hopper kernels take 64 and 128", shape.head_dim);
  }
  const std::string architecture = architecture_of(this_share()->device());
  return architecture == kHopper ? ""
                                 : fmt::format("{}: Hopper kernels need {}", architecture, kHopper);
}

std::unique_ptr<FusedAttention> make_hopper_attention(const Exec& exec, const AttentionShape& shape,
                                                      const RopeTable& rope,
                                                      const AttentionRows& rows) {
  return std::make_unique<HopperAttention>(exec, shape, rope, rows);
}

}  // namespace tandem::gpu

// AG+GEMM on GPUs: out[M, N] = all-gather(x)[M, K] x weight^T + bias (FLUX §3.2).
//
// chunked: the copy engine pushes this rank's shard to the others in ring order, one transfer and
// one signal each, while the own shard is multiplied in place; then a GEMM per shard as it arrives.
// fused: one persistent GEMM beside the same transfers; its tiles wait for the shard they read.
// Shards cross into a symmetric buffer that is written again only after every rank has entered the
// next call. Nothing waits on the host; a captured graph can be replayed.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cuda/gemm_lt.h"
#include "overlap/ag_gemm/cuda/fused.h"
#include "overlap/cuda/dense.h"

namespace tandem::gpu {

class AgGemm {
 public:
  /// Collective. N may differ by rank.
  AgGemm(NcclCommunicator& comm, const LtContext& lt, const DenseShape& shape,
         Way way = Way::automatic);
  /// x: [shard_of(m, size, rank).count, k]; out: [m, n]. Enqueues on the communicator's stream.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr) {
    run(way_, x, weight, out, bias);
  }
  /// The same by one of `ways()`, whatever was chosen.
  void run(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
           const Tensor* bias = nullptr);
  Way way() const { return way_; }
  std::vector<Way> ways() const;
  /// Tile shapes and orders of the fused way; the fastest is in use unless another is asked for.
  int fused_variants() const;
  void use_fused_variant(int variant) { fused_variant_ = variant; }
  std::string describe_fused() const { return variant_name(fused_variant_); }
  /// [m, k]: after a run the others' rows, and after a serial one all.
  Tensor gathered() const;
  /// The product alone, of rows that are already here: what perfect overlap would cost.
  void gemm_only(const Tensor& gathered, const Tensor& weight, const Tensor& out,
                 const Tensor* bias = nullptr);

 private:
  void push_shards(const Tensor& x, cudaStream_t entering);
  void run_fused(const Tensor& x, const Tensor& weight, const Tensor& out);
  std::string variant_name(int variant) const;
  std::vector<std::string> variant_names() const;
  void run_serial(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                  const void* bias);
  void run_chunked(const Tensor& x, const Tensor& weight, const Tensor& out, const void* bias);
  std::byte* gathered_rows(int at, int64_t row) const;

  NcclCommunicator& comm_;
  DenseShape shape_;
  Shard mine_;
  LtGemm whole_;
  std::vector<LtGemm> shards_;  // by rank
  std::shared_ptr<NcclBuffer> gathered_;
  DeviceMemory epochs_;  // of the pushing and of the multiplying stream
  Stream side_{Priority::high};
  Event begun_, pushed_;
  std::vector<std::unique_ptr<FusedAgKernel>> kernels_;  // empty where the shape has no fused way
  std::vector<const char*> tiles_;                       // their names
  int fused_variant_ = 0;
  Way way_;
};

}  // namespace tandem::gpu

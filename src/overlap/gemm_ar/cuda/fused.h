// One GEMM for few rows of x with the all-reduce as its tail (Hopper; bf16, f16 and e4m3; up to 256
// rows). A tile is 64 output features of all rows, or of up to 128; the same block of every rank
// has the same tile, so tiles are exchanged one by one.
//
// If there are at most half as many tiles as resident blocks, several blocks may split one along K:
// helpers store their split-K partials, in f32, in local global memory (normally L2-resident) for
// the tile's main block, which waits for them and adds them in order. No other block waits for one
// of its own rank.
//
// Operands are swapped: the weight's rows are the tensor cores' 64 rows, the tokens their columns.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "comm/device/device_signal.h"
#include "gemm/cuda/scale.h"

namespace tandem::gpu {

/// Layout of tiles in the symmetric staging memory, which is initially zero. A vec is a vector of
/// at most 16 bytes that a thread stores or loads at once. A thread's words stay in register order,
/// as only the same thread of the same tile reads them, and the reader resets them to 0
/// (exchange_tile.cuh). Each area exists twice, by the parity of the epoch: a rank sends in call e
/// + 2 only after its call e + 1, which needs what every peer sends in call e + 1, after that
/// peer's call e.
///
/// The PTX memory model does not order the 0 that a reader stores in call e before a peer's store
/// to the same slot in call e + 2: both are relaxed, and so is everything that links them. It works
/// because a kernel completes only when its stores have been performed at the owning GPU's L2, so
/// the reader's 0 is visible before its call e + 1 sends anything. Hence no two calls of an
/// operator may overlap. The kernel triggers its programmatic dependents at once, which is correct
/// for those that wait for its completion (griddepcontrol.wait) before they access the staging
/// memory; this kernel does not wait in that way, and must not itself be launched as a programmatic
/// dependent.
struct ArStaging {
  static constexpr int kFeatures = 64, kThreads = 128;
  static constexpr int kMaxTokens = 128;     // per tile: with more, two tiles share the features
  static constexpr int kOneShotTokens = 64;  // max
  static constexpr int kTwoShotTokens = 32;  // min: a thread has two vectors to share out

  int ranks = 1, tiles = 0, tokens = 0;

  constexpr bool one_shot() const { return tokens <= kOneShotTokens; }
  constexpr bool two_shot() const { return tokens >= kTwoShotTokens; }
  /// Vectors per thread, of eight results each, or four if there are no more.
  constexpr int vecs() const { return tokens < 16 ? 1 : tokens / 16; }
  /// Bytes of one vector of each thread.
  constexpr size_t vec_row() const { return kThreads * (tokens < 16 ? 8 : 16); }
  /// Max vectors of a tile that a rank owns.
  constexpr int share_vecs() const { return (vecs() + ranks - 1) / ranks; }

  constexpr size_t whole(int parity, int source, int tile) const {
    return at(parity, source, tile, one_shot() ? vecs() : 0);
  }
  constexpr size_t share(int parity, int source, int tile) const {
    return whole(2, 0, 0) + at(parity, source, tile, two_shot() ? share_vecs() : 0);
  }
  constexpr size_t sum(int parity, int tile) const {
    return share(2, 0, 0) + (size_t(parity) * tiles + tile) * (two_shot() ? vecs() : 0) * vec_row();
  }
  constexpr size_t bytes() const { return sum(2, 0); }
  /// Offset in local memory of a helper's split-K partial of a tile, in f32 (twice the bytes of
  /// results). Not doubled by parity: the tile's main block empties it before its call ends and the
  /// next one begins.
  constexpr size_t split_partial(int helper, int tile) const {
    return (size_t(helper) * tiles + tile) * 2 * vecs() * vec_row();
  }

 private:
  constexpr size_t at(int parity, int source, int tile, int rows) const {
    return ((size_t(parity) * ranks + source) * tiles + tile) * rows * vec_row();
  }
};

struct FusedArArgs {
  int64_t m, n, k;
  const void* x;         ///< [m, k]
  const void* weight;    ///< [n, k]
  ScalePointers scales;  ///< e4m3
  bool scaled_by_row;    ///< else one scale for each operand
  const void* bias;      ///< [n] on the rank that adds it, else nullptr
  void* out;             ///< [m, n]
  PeerTable staging;
  ArStaging layout;
  std::byte* split_partials;  ///< initially zero; of layout.split_partial(helpers, 0) bytes
  int split;  ///< blocks that share a tile along K, main block and helpers: 1 to max_splits()
  CallCounter* calls;  ///< counts one reader per block
  bool two_shot;
  Deadline deadline;
};

/// One number of tokens and of blocks of a cluster, which share their loads of x (256 tokens: of
/// the weight). Host-side launch state is cached and reused while the operands stay the same.
class FusedArKernel {
 public:
  virtual ~FusedArKernel() = default;
  /// Max blocks that can share a tile of `n` features along `k`, such that all are resident and
  /// have work: at least 1.
  virtual int max_splits(int64_t n, int64_t k) const = 0;
  virtual void launch(const FusedArArgs& args, cudaStream_t stream) = 0;
};

struct FusedArTile {
  int tokens, cluster;
};
constexpr FusedArTile kFusedArTiles[] = {{8, 1}, {16, 1}, {32, 2}, {64, 2}, {128, 2}, {256, 2}};
constexpr int kFusedArTokens = 256;
constexpr int kMaxArSplits = 4;
/// Tokens of the smallest tile that holds `rows`.
constexpr int fused_ar_tokens(int64_t rows) {
  int tokens = 8;
  while (tokens < rows) tokens *= 2;
  return tokens;
}

std::unique_ptr<FusedArKernel> make_fused_ar_bf16(FusedArTile tile);
std::unique_ptr<FusedArKernel> make_fused_ar_f16(FusedArTile tile);
// e4m3, by dtype of the result.
std::unique_ptr<FusedArKernel> make_fused_ar_fp8_bf16(FusedArTile tile);
std::unique_ptr<FusedArKernel> make_fused_ar_fp8_f16(FusedArTile tile);

}  // namespace tandem::gpu

// Conversion of a warpgroup's half of a tile once its accumulators are final: it is rounded into
// registers at once, and written to shared memory, a box at a time, under the next tile's main
// loop. A storing warp copies it from there (tile_storer.cuh). These are the `Tile`s of a sink
// (gemm_block.cuh); encoded_tile.cuh has another one. Members of a `Tile`:
//   Words                        registers of a thread that hold a tile
//   take(params, work, sums)     converts the accumulators to them; the accumulators are then free
//   is_waiting(), write_box(box) tells whether it holds a tile; writes one box of it
//   add(sums, stage, received)   if work items add rows: adds those of a stage, either received
//                                ones or a split-K partial's
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/cuda/gemm_tiles.cuh"

namespace tandem::gpu::fused {

/// Position of a thread in a multiplying warpgroup.
struct GroupThread {
  int group, thread, warp, lane;
  __device__ explicit GroupThread(int group)
      : group(group), thread(int(threadIdx.x) % 128), warp(thread / 32), lane(thread % 32) {}
};

/// The previous tile, in registers until it is written.
template <class Tiles>
class StagedTile {
 public:
  /// Array owned by the caller, not a member: as a member, it would keep the others in memory until
  /// the loops that index it are unrolled, too late to move their uses out of the main loop.
  using Words = uint32_t[Tiles::kStoredWords];

  __device__ StagedTile(typename Tiles::Shared& shared, const GroupThread& at, Words& words)
      : shared_(shared), at_(at), words_(words) {}

  __device__ bool is_waiting() const { return waits_; }

 protected:
  /// Writes box by box, in order. `copy` writes this warp's share, and ends with publish().
  template <class Copy>
  __device__ void write(Copy&& copy) {
    shared_.taken[at_.group][buffer_.index].wait(buffer_.phase ^ 1);
    copy(shared_.staged[at_.group][buffer_.index]);
    if (at_.lane == 0) shared_.written[at_.group][buffer_.index].arrive();
    buffer_.advance();
  }
  __device__ void copy_rounded(int box, std::byte* to) const {
#pragma unroll
    for (int i = 0; i < Tiles::kColumnGroups16; ++i) {
      store_16(words_ + 4 * (box * Tiles::kColumnGroups16 + i),
               lane_address(address_of(to), at_.warp, at_.lane, i));
    }
    publish();
  }
  /// Makes this warp's writes visible to TMA.
  __device__ static void publish() {
    cute::tma_store_fence();
    __syncwarp();
  }

  typename Tiles::Shared& shared_;
  const GroupThread at_;
  Words& words_;
  PipelineState<Tiles::kBuffers> buffer_;
  bool waits_ = false;
};

/// Rounds to the result's type. A split-K partial is written at once, as hi + lo.
template <class Tiles>
class RoundedTile : public StagedTile<Tiles> {
  using Element = typename Tiles::Element;

 public:
  using StagedTile<Tiles>::StagedTile;

  __device__ void write_box(int box) {
    this->write([&](std::byte* to) { this->copy_rounded(box, to); });
  }
  template <class Params, class Work>
  __device__ void take(const Params&, const Work& work, const float (&sums)[Tiles::kSums]) {
    round_sums<Element>(sums, this->words_);
    this->waits_ = !work.writes_partial;
    if (this->waits_) return;
    write_all();
    round_remainder<Element>(sums, this->words_);
    write_all();
  }
  /// Adds rounded rows from the ring: this warp's rows of all boxes.
  __device__ void add(float (&sums)[Tiles::kSums], const std::byte* stage, bool) const {
    const uint32_t boxes = address_of(stage);
#pragma unroll
    for (int i = 0; i < Tiles::kTileColumns / 16; ++i) {
      add_to_sums<Element>(
          sums, i,
          lane_address(boxes + i / Tiles::kColumnGroups16 * Tiles::kBoxBytes, this->at_.warp,
                       this->at_.lane, i % Tiles::kColumnGroups16));
    }
  }

 private:
  __device__ void write_all() {
#pragma unroll
    for (int box = 0; box < Tiles::kBoxes; ++box) write_box(box);
  }
};

/// silu(gate) x up, rounded: half the columns.
template <class Tiles>
class GatedTile : public StagedTile<Tiles> {
  static_assert(Tiles::kOptions.gated);

 public:
  using StagedTile<Tiles>::StagedTile;

  __device__ void write_box(int box) {
    this->write([&](std::byte* to) { this->copy_rounded(box, to); });
  }
  template <class Params, class Work>
  __device__ void take(const Params&, const Work&, const float (&sums)[Tiles::kSums]) {
    this->waits_ = true;
    round_gated<typename Tiles::Element>(sums, this->words_);
  }
};

}  // namespace tandem::gpu::fused

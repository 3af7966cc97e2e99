// Tile that may be sent in a wire format (tile_codec.cuh).
#pragma once

#include "gemm/cuda/staged_tile.cuh"
#include "gemm/cuda/tile_codec.cuh"

namespace tandem::gpu::fused {

/// A sink's `Tile` (gemm_block.cuh): encoded by a TileCodec, within `params.limit`, if the work
/// item is sent to another rank, else rounded. Added rows are encoded, too, except split-K
/// partials.
template <class Tiles, class Codec>
class EncodedTile : public RoundedTile<Tiles> {
  static_assert(Tiles::kBoxes == Codec::kBoxes && Tiles::kSums == Codec::kSums &&
                Codec::kBoxBytes <= int(Tiles::kBoxBytes) &&
                Codec::kSliceBytes <= int(Tiles::kWeightBytes));

 public:
  using RoundedTile<Tiles>::RoundedTile;

  __device__ void write_box(int box) {
    this->write([&](std::byte* to) {
      if (encoded_) {
        Codec::write(this->words_, box, to, this->at_.thread);
        this->publish();
      } else {
        this->copy_rounded(box, to);
      }
    });
  }
  template <class Params, class Work>
  __device__ void take(const Params& params, const Work& work, const float (&sums)[Tiles::kSums]) {
    encoded_ = work.travels();
    if (!encoded_) return RoundedTile<Tiles>::take(params, work, sums);
    this->waits_ = true;
    Codec::encode(sums, params.limit, this->at_.lane, this->words_);
  }
  __device__ void add(float (&sums)[Tiles::kSums], const std::byte* stage, bool received) const {
    if (!received) return RoundedTile<Tiles>::add(sums, stage, received);
    Codec::add(sums, stage, this->at_.thread);
  }

 private:
  bool encoded_ = false;
};

}  // namespace tandem::gpu::fused

#include "collectives/encoded/encoded.h"

#include <fmt/format.h>

#include <optional>

#include "codec/feedback.h"
#include "codec/tiles.h"
#include "codec/whole.h"
#include "core/operands.h"

namespace tandem::collectives {

using namespace codec;

void require_encoded(const char* op, const Communicator& comm, const Wire& wire, const Tensor& data,
                     const Tensor* residual) {
  if (comm.on_gpu()) {
    throw Unsupported(fmt::format("{}: codec '{}' on transport {}: expected CPU ranks", op,
                                  wire.describe(), comm.transport()));
  }
  require_encodable(wire, data.dtype());
  if (!residual) return;
  require_contiguous(op, "residual", *residual);
  if (residual->dtype() != DType::f32 || residual->elements() != data.elements()) {
    throw InvalidArgument(
        fmt::format("{}: residual {} of data {}: expected f32 of as many elements", op,
                    residual->describe(), data.describe()));
  }
  require_apart(op, {{"residual", residual}}, {{"data", &data}});
}

Encoded::Encoded(Call& call, const Wire& wire, DType dtype, int64_t largest)
    : call_(call), wire_(wire), dtype_(dtype) {
  if (largest == 0) return;
  chunk_ = chunk_for(largest);
  steps_ = slices_in(largest, chunk_);
}

int64_t Encoded::chunk_for(int64_t elements) const {
  const size_t whole = wire_.bytes(elements, dtype_), each = call_.chunk_bytes(whole);
  auto chunk = int64_t(double(elements) * double(each) / double(whole)) / kWireBlock * kWireBlock;
  chunk = std::max<int64_t>(chunk, kWireBlock);
  while (wire_.bytes(chunk, dtype_) > call_.slot_bytes()) chunk -= kWireBlock;
  return chunk;
}

int64_t Encoded::steps_of(int64_t elements) const {
  return elements == 0 ? 0 : slices_in(elements, chunk_for(elements));
}

Elements Encoded::chunk(const Elements& shard, int64_t step) const {
  if (step < 0 || shard.count == 0) return {};
  const Slice slice = slice_of(shard.count, chunk_ ? chunk_ : chunk_for(shard.count), step);
  return {shard.begin + slice.begin, slice.count};
}

size_t Encoded::encode(const std::byte* values, int64_t count, float* residual,
                       std::byte* message) const {
  return encode_with_feedback(wire_, dtype_, values, count, residual, message);
}

void Encoded::decode(const std::byte* message, int64_t count, std::byte* values) const {
  decode_whole(wire_, {message, call_.slot_bytes()}, dtype_, values, count);
}

void Encoded::send(Stream stream, int peer, const std::byte* values, int64_t count,
                   float* residual) {
  std::byte* message = call_.staging(stream, peer);
  call_.send(stream, peer, message, encode(values, count, residual, message));
}

void Encoded::receive(Stream stream, int source, std::byte* values, int64_t count) {
  decode(call_.receive(stream, source), count, values);
  call_.release(stream, source);
}

/// Sum of tiles.
class Encoded::Sum {
 public:
  Sum(Encoded& encoded, const std::vector<Partial>& partials, int64_t count)
      : dtype_(encoded.dtype_), partials_(partials), decoders_(partials.size()) {
    encoded.exact_.resize(partials.size());
    for (size_t i = 0; i < partials.size(); ++i) {
      if (!partials[i].is_message) continue;
      if (!encoded.wire_.is_exact()) {
        decoders_[i].emplace(encoded.wire_, count, largest_of(dtype_), partials[i].bytes);
        continue;
      }
      auto& exact = encoded.exact_[i];
      exact.resize(size_t(count) * size_of(dtype_));
      encoded.decode(partials[i].bytes, count, exact.data());
      partials_[i].bytes = exact.data();
    }
  }
  /// Sum of elements [first, first + count), padded to whole blocks.
  void get(int64_t first, int count, float* sum) const {
    alignas(64) float tile[kTile];
    summand(0, first, count, sum);
    for (size_t i = 1; i < partials_.size(); ++i) {
      summand(i, first, count, tile);
      add(tile, count, sum);
    }
    fill_up(sum, count);
  }

 private:
  void summand(size_t i, int64_t first, int count, float* tile) const {
    if (decoders_[i]) return decoders_[i]->get(first, count, tile);
    widen_at(dtype_, partials_[i].bytes, first, count, tile);
  }
  const DType dtype_;
  std::vector<Partial> partials_;
  std::vector<std::optional<TileDecoder>> decoders_;
};

void Encoded::reduce(const std::vector<Partial>& partials, int64_t count, std::byte* out) {
  const Sum all(*this, partials, count);
  alignas(64) float sum[kTile];
  for_tiles(count, [&](int64_t first, int n) {
    all.get(first, n, sum);
    narrow_at(dtype_, sum, first, n, out);
  });
}

size_t Encoded::reduce_into(const std::vector<Partial>& partials, int64_t count, float* residual,
                            std::byte* message, std::byte* out) {
  if (wire_.is_exact()) {
    reduce(partials, count, out);
    return encode(out, count, nullptr, message);
  }
  const Sum all(*this, partials, count);
  const TileEncoder encoder(wire_, count, largest_of(dtype_), message);
  const TileDecoder decoder(wire_, count, largest_of(dtype_), message);
  alignas(64) float sum[kTile], decoded[kTile];
  for_tiles(count, [&](int64_t first, int n) {
    all.get(first, n, sum);
    if (residual) {
      add(residual + first, n, sum);
      fill_up(sum, n);
    }
    encoder.put(first, n, sum);
    decoder.get(first, n, decoded);
    if (residual) keep_error(sum, decoded, n, residual + first);
    narrow_at(dtype_, decoded, first, n, out);
  });
  return wire_.bytes(count, dtype_);
}

}  // namespace tandem::collectives

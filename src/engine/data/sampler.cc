#include "engine/data/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "engine/data/stream/shard_stream.h"
#include "engine/data/text/documents.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

constexpr uint64_t kOrderStream = stream_of("sample order");
constexpr uint64_t kSeedStep = 0x9e3779b97f4a7c15;  // between the seeds of a blend's sources

std::vector<double> weights_of(const TokenSource& source) {
  std::vector<double> weights;
  for (const WeightedSource& component : source.components()) weights.push_back(component.weight);
  return weights;
}

}  // namespace

int64_t permute(uint64_t seed, uint64_t epoch, int64_t size, int64_t index) {
  const int half = (int(std::bit_width(uint64_t(size - 1))) + 1) / 2;
  const uint64_t mask = (uint64_t(1) << half) - 1;
  uint64_t value = uint64_t(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = philox(seed, kOrderStream + epoch, right << 2 | round)[0] & mask;
      left = std::exchange(right, left ^ mixed);
    }
    value = left << half | right;
  } while (value >= uint64_t(size));
  return int64_t(value);
}

Sampler::Sampler(const TokenSource& source, int64_t seq, uint64_t seed, SamplerOptions options)
    : seq_(seq), seed_(seed), blend_(weights_of(source)), options_(std::move(options)) {
  for (const WeightedSource& component : source.components()) {
    Stream stream{component.source,          component.weight, nullptr, windows_, 0,
                  component.source->stream()};
    if (stream.shards) {
      streams_.push_back(std::move(stream));
      continue;
    }
    if (options_.is_packed) stream.packing = share_packing(*stream.source, seq);
    stream.windows =
        stream.packing ? stream.packing->sequences() : (stream.source->tokens() - 2) / seq + 1;
    windows_ += stream.windows;
    streams_.push_back(std::move(stream));
  }
}

std::vector<SampledSource> Sampler::sources() const {
  std::vector<SampledSource> sources;
  for (const Stream& stream : streams_) sources.push_back({stream.weight, stream.windows});
  return sources;
}

std::optional<double> Sampler::padding() const {
  if (!options_.is_packed) return {};
  int64_t predictions = 0;
  for (const Stream& stream : streams_) predictions += stream.packing->predictions();
  return 1 - double(predictions) / (double(windows_) * double(seq_));
}

bool Sampler::has_padding() const {
  return std::ranges::any_of(streams_, [&](const Stream& stream) {
    if (stream.shards) return false;
    if (stream.packing) return stream.packing->predictions() < stream.windows * seq_;
    return stream.source->tokens() < stream.windows * seq_;
  });
}

Sampler::Location Sampler::locate(int64_t sample) const {
  if (options_.order) sample = options_.order(sample);
  const size_t stream = streams_.size() == 1 ? 0 : blend_.source(sample);
  const int64_t index = streams_.size() == 1 ? sample : blend_.count(stream, sample);
  const uint64_t seed = seed_ + stream * kSeedStep;
  if (const ShardStream* shards = streams_[stream].shards) {
    const int64_t size = shards->shuffle_windows();
    const int64_t block = index / size;
    return {stream, block * size + permute(seed, uint64_t(block), size, index % size)};
  }
  const int64_t windows = streams_[stream].windows;
  const int64_t epoch = index / windows;
  return {stream, permute(seed, uint64_t(epoch), windows, index % windows)};
}

int64_t Sampler::window(int64_t sample) const {
  const Location location = locate(sample);
  return streams_[location.stream].first_window + location.window;
}

int64_t Sampler::ended_epochs(int64_t sample) const {
  if (streams_.size() == 1) return epoch(sample);
  int64_t ended = 0;
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (streams_[i].shards) continue;  // whose shards are verified as they end
    ended += blend_.count(i, sample) / streams_[i].windows;
  }
  return ended;
}

std::vector<StreamCursor> Sampler::cursors(int64_t sample) const {
  std::vector<StreamCursor> cursors;
  const bool has_shards =
      std::ranges::any_of(streams_, [](const Stream& stream) { return stream.shards != nullptr; });
  if (!has_shards) return cursors;
  if (options_.order) sample = options_.order(sample);
  for (size_t i = 0; i < streams_.size(); ++i) {
    const ShardStream* shards = streams_[i].shards;
    if (!shards) continue;
    const int64_t index = streams_.size() == 1 ? sample : blend_.count(i, sample);
    cursors.push_back(shards->reach((index - index % shards->shuffle_windows()) * seq_));
  }
  return cursors;
}

void Sampler::seek(std::span<const StreamCursor> cursors) const {
  size_t used = 0;
  for (const Stream& stream : streams_) {
    if (stream.shards && used < cursors.size()) stream.shards->seek(cursors[used++]);
  }
}

bool Sampler::read_ahead() const {
  bool has_more = false;
  for (const Stream& stream : streams_) has_more = stream.source->read_ahead() || has_more;
  return has_more;
}

int64_t Sampler::targets(int64_t sample) const {
  const Location location = locate(sample);
  const Stream& stream = streams_[location.stream];
  if (stream.packing) return stream.packing->targets(location.window);
  if (stream.shards) {
    if (!options_.document_mask || stream.source->format() != "tokens") return seq_;
    std::vector<int32_t> tokens(static_cast<size_t>(seq_)), targets(tokens.size());
    read_shards(location, tokens, targets, {});
    return seq_ - std::ranges::count(targets, -1);
  }
  const int64_t begin = location.window * seq_;
  const int64_t targets = std::min(seq_, stream.source->tokens() - 1 - begin);
  if (!options_.document_mask) return targets;
  return targets - count_ignored_targets(*stream.source, begin + 1, begin + 1 + targets);
}

void Sampler::read(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> targets,
                   std::span<int32_t> document_starts) const {
  const Location location = locate(sample);
  const Stream& stream = streams_[location.stream];
  if (stream.packing) {
    return stream.packing->read(location.window, tokens, targets, document_starts);
  }
  if (stream.shards) return read_shards(location, tokens, targets, document_starts);
  const TokenSource& source = *stream.source;
  const int64_t begin = location.window * seq_;
  source.read(begin, tokens);
  source.read(begin + 1, targets);
  if (options_.document_mask) ignore_targets(source, begin + 1, targets);
  if (!document_starts.empty()) find_document_starts(source, begin, document_starts);
}

void Sampler::read_shards(const Location& location, std::span<int32_t> tokens,
                          std::span<int32_t> targets, std::span<int32_t> document_starts) const {
  const ShardStream& shards = *streams_[location.stream].shards;
  const int64_t window = location.window;
  shards.reach((window - window % shards.shuffle_windows()) * seq_);
  std::vector<int32_t> stream(tokens.size() + 1);
  std::vector<int64_t> begins;
  shards.read(window * seq_, stream, begins);
  std::copy_n(stream.begin(), tokens.size(), tokens.begin());
  std::copy_n(stream.begin() + 1, targets.size(), targets.begin());
  if (!options_.document_mask) return;
  std::ranges::fill(document_starts, 0);
  const int32_t start_token = shards.start_token();
  for (const int64_t begin : begins) {
    if (begin > 0 && (start_token < 0 || stream[size_t(begin)] != start_token)) {
      if (start_token >= 0 && stream[size_t(begin - 1)] == start_token) continue;  // begins there
      targets[size_t(begin - 1)] = -1;
    }
    if (begin >= int64_t(document_starts.size())) continue;
    std::fill(document_starts.begin() + begin, document_starts.end(), int32_t(begin));
  }
}

}  // namespace tandem

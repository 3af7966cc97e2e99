#include "engine/data/blend/blend.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/system/files.h"

namespace tandem {

Blend::Blend(Sources sources, std::vector<double> weights)
    : sources_(std::move(sources)), weights_(std::move(weights)) {
  std::string hashes;
  for (size_t i = 0; i < sources_.size(); ++i) {
    starts_.push_back(starts_.back() + sources_[i]->tokens());
    hashes += fmt::format("{} {}\n", weights_[i], sources_[i]->fingerprint());
    const auto& notes = sources_[i]->notes();
    notes_.insert(notes_.end(), notes.begin(), notes.end());
    const auto& records = sources_[i]->records();
    records_.insert(records_.end(), records.begin(), records.end());
  }
  fingerprint_ = content_hash(hashes);
  for (size_t i = 0; i < sources_.size(); ++i) {
    for (const int64_t boundary : sources_[i]->scored_spans()) {
      scored_.push_back(starts_[i] + boundary);
    }
  }
  join_held_out();
}

void Blend::join_held_out() {
  Sources streams;
  std::vector<std::string> identities;
  for (const auto& source : sources_) {
    const HeldOut& set = source->held_out();
    if (set.empty()) continue;
    held_out_.files.insert(held_out_.files.end(), set.files.begin(), set.files.end());
    held_out_.sizes.insert(held_out_.sizes.end(), set.sizes.begin(), set.sizes.end());
    if (set.stream) streams.push_back(set.stream);
    identities.push_back(set.identity);
  }
  held_out_.identity = fmt::format("{}", fmt::join(identities, "; "));
  if (streams.empty()) return;
  std::vector<double> equal(streams.size(), 1);
  held_out_.stream = std::make_shared<Blend>(std::move(streams), std::move(equal));
}

void Blend::read(int64_t begin, std::span<int32_t> out) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
  size_t source = size_t(after - starts_.begin()) - 1, filled = 0;
  for (; filled < out.size() && source < sources_.size(); ++source) {
    const int64_t skipped = begin + int64_t(filled) - starts_[source];
    const auto count = size_t(
        std::min(sources_[source]->tokens() - skipped, int64_t(out.size()) - int64_t(filled)));
    sources_[source]->read(skipped, out.subspan(filled, count));
    filled += count;
  }
  std::fill(out.begin() + long(filled), out.end(), -1);
}

std::span<const int64_t> Blend::document_begins() const {
  std::call_once(once_, [&] {
    std::vector<int64_t> begins, unpredicted;
    for (size_t i = 0; i < sources_.size(); ++i) {
      const std::span<const int64_t> of_source = sources_[i]->document_begins();
      if (of_source.empty()) return;
      for (const int64_t begin : of_source.first(of_source.size() - 1)) {
        begins.push_back(starts_[i] + begin);
      }
      for (const int64_t begin : sources_[i]->unpredicted_begins()) {
        if (begin < sources_[i]->tokens()) unpredicted.push_back(starts_[i] + begin);
      }
    }
    begins.push_back(tokens());
    document_begins_ = std::move(begins);
    unpredicted_begins_ = std::move(unpredicted);
  });
  return document_begins_;
}

std::span<const int64_t> Blend::unpredicted_begins() const {
  document_begins();
  return unpredicted_begins_;
}

std::span<const int64_t> Blend::scored_spans() const {
  return scored_;
}

int32_t Blend::start_token() const {
  const int32_t token = sources_[0]->start_token();
  const bool is_common = std::ranges::all_of(
      sources_, [&](const auto& source) { return source->start_token() == token; });
  return is_common ? token : -1;
}

void Blend::verify(Communicator* world) const {
  for (const auto& source : sources_) source->verify(world);
}

std::string Blend::describe() const {
  const double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  std::vector<std::string> texts;
  for (size_t i = 0; i < sources_.size(); ++i) {
    texts.push_back(
        fmt::format("{:.4g} % ({})", 100 * weights_[i] / total, sources_[i]->describe()));
  }
  return fmt::format("a blend of {}", fmt::join(texts, ", "));
}

std::string Blend::identity() const {
  return fmt::format("{} sources, {} tokens, hash {}", sources_.size(), tokens(), fingerprint());
}

std::vector<WeightedSource> Blend::components() const {
  std::vector<WeightedSource> components;
  for (size_t i = 0; i < sources_.size(); ++i) {
    components.push_back({sources_[i].get(), weights_[i]});
  }
  return components;
}

}  // namespace tandem

#include "engine/infer/sampling/shard_sampler.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/cpu/parallel.h"
#include "core/host_copy.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

using cpu::Candidate;

/// Token of a rank that has none to send.
constexpr Candidate kNone{-std::numeric_limits<float>::infinity(),
                          std::numeric_limits<int32_t>::max()};

bool is_sent(const Candidate& candidate) {
  return candidate.token != kNone.token;
}

/// The likeliest tokens of all ranks, `count` of each, up to the first after which a rank may have
/// tokens that it did not send.
std::vector<Candidate> merge(std::span<const Candidate> sent, size_t count, int64_t vocab,
                             int world) {
  std::vector<Candidate> all;
  Candidate last = kNone;
  for (int rank = 0; rank < world; ++rank) {
    const auto of_rank = sent.subspan(size_t(rank) * count, count);
    std::ranges::copy_if(of_rank, std::back_inserter(all), is_sent);
    const bool has_more = size_t(shard_of(vocab, world, rank).count) > count;
    if (has_more && is_likelier(of_rank.back(), last)) last = of_rank.back();
  }
  std::ranges::sort(all, cpu::is_likelier);
  const auto end = std::ranges::upper_bound(all, last, cpu::is_likelier);
  all.erase(end, all.end());
  return all;
}

}  // namespace

template <typename T>
std::vector<T> ShardSampler::gather(const std::vector<T>& local) {
  const int world = tp_.size();
  if (world == 1 || local.empty()) return local;
  std::vector<T> all(size_t(world) * local.size());
  const auto bytes = int64_t(local.size() * sizeof(T));
  const Tensor shard(const_cast<T*>(local.data()), DType::u8, {1, bytes});
  all_gather(tp_, shard, Tensor(all.data(), DType::u8, {world, bytes}));
  sent_bytes_ += bytes;
  return all;
}

size_t ShardSampler::num_candidates(const SampleOptions& options) const {
  if (options.temperature == 0 || !cpu::chooses_among_likeliest(options, vocab_)) return 0;
  const bool has_few = options.top_k > 0 && options.top_k < vocab_;
  if (!has_few) return size_t(std::min(vocab_, kMaxCandidates));
  return options.top_k > kMaxCandidates ? 0 : size_t(options.top_k);
}

bool ShardSampler::draws_from_all(const Row& row) const {
  return row.is_finite() && row.options.temperature != 0 &&
         !cpu::chooses_among_likeliest(row.options, vocab_);
}

cpu::TokenWeights ShardSampler::weights(const Row& row) const {
  return {row.max.logit, row.options.temperature, vocab_};
}

std::vector<int32_t> ShardSampler::run(const Tensor& logits, std::span<const SampleOptions> options,
                                       std::span<Sampled> sampled) {
  std::vector<Row> rows;
  for (size_t i = 0; i < options.size(); ++i) {
    rows.push_back({.options = options[i],
                    .logits = logits.rows(int64_t(i), 1),
                    .num_candidates = num_candidates(options[i])});
  }
  find_maxima(rows);
  exchange_sums(rows);
  draw_tokens(rows);
  std::vector<int32_t> left;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    sampled[i] = {-1, 0};
    if (!row.is_finite()) continue;
    if (row.chosen.token < 0) {
      left.push_back(int32_t(i));
      continue;
    }
    const cpu::TokenWeights at_one(row.max.logit, 1, vocab_);
    sampled[i] = {row.chosen.token,
                  float(double(row.chosen.logit) - at_one.log_of(row.sum_of_exponentials))};
  }
  return left;
}

void ShardSampler::find_maxima(std::span<Row> rows) {
  const auto first = int32_t(shard_of(vocab_, tp_.size(), tp_.rank()).begin);
  std::vector<Candidate> local;
  for (const Row& row : rows) {
    local.push_back(row.logits.elements() == 0 ? kNone
                                               : cpu::find_max(host_values(row.logits), first));
  }
  const std::vector<Candidate> all = gather(local);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].max = kNone;
    for (size_t at = i; at < all.size(); at += rows.size()) {
      if (all[at].token < 0 || rows[i].max.token < 0) {
        rows[i].max.token = -1;
      } else if (is_likelier(all[at], rows[i].max)) {
        rows[i].max = all[at];
      }
    }
    if (rows[i].options.temperature == 0) rows[i].chosen = rows[i].max;
  }
}

std::vector<uint64_t> ShardSampler::pack(const Row& row) const {
  std::vector<uint64_t> words(1 + size_t(row.has_temperature()) + row.num_candidates,
                              std::bit_cast<uint64_t>(kNone));
  if (!row.is_finite()) return words;
  words[0] = cpu::TokenWeights(row.max.logit, 1, vocab_).sum(host_values(row.logits));
  if (row.has_temperature()) words[1] = weights(row).sum(host_values(row.logits));
  const auto first = int32_t(shard_of(vocab_, tp_.size(), tp_.rank()).begin);
  const auto likeliest = cpu::find_likeliest(host_values(row.logits), first, row.num_candidates);
  std::ranges::transform(likeliest, words.end() - int64_t(row.num_candidates),
                         [](const Candidate& each) { return std::bit_cast<uint64_t>(each); });
  return words;
}

void ShardSampler::unpack(std::span<const uint64_t> gathered, size_t words, Row& row) const {
  std::vector<Candidate> sent;
  for (int rank = 0; rank < tp_.size(); ++rank) {
    const uint64_t* word = &gathered[size_t(rank) * words];
    row.sum_of_exponentials += *word;
    row.total += row.has_temperature() ? *++word : *word;
    for (size_t i = 0; i < row.num_candidates; ++i) {
      sent.push_back(std::bit_cast<Candidate>(*++word));
    }
  }
  if (!row.is_finite() || row.num_candidates == 0) return;
  const auto likeliest = merge(sent, row.num_candidates, vocab_, tp_.size());
  const auto chosen =
      cpu::choose_likeliest(likeliest, weights(row), row.total, vocab_, row.options);
  if (chosen) row.chosen = *chosen;
}

void ShardSampler::exchange_sums(std::span<Row> rows) {
  std::vector<std::vector<uint64_t>> packed(rows.size());
  cpu::parallel_ranges(int64_t(rows.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = size_t(begin); i < size_t(end); ++i) packed[i] = pack(rows[i]);
  });
  std::vector<uint64_t> local;
  for (const auto& words : packed) local.insert(local.end(), words.begin(), words.end());
  const std::vector<uint64_t> all = gather(local);
  sums_before_.clear();
  size_t at = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto gathered = std::span(all).subspan(at);
    unpack(gathered, local.size(), rows[i]);
    uint64_t before = 0;
    for (int rank = 0; rank < tp_.rank(); ++rank) {
      before += gathered[size_t(rank) * local.size() + size_t(rows[i].has_temperature())];
    }
    sums_before_.push_back(before);
    at += packed[i].size();
  }
}

/// The rank whose tokens include the drawn position sends its token.
void ShardSampler::draw_tokens(std::span<Row> rows) {
  const auto first = int32_t(shard_of(vocab_, tp_.size(), tp_.rank()).begin);
  std::vector<size_t> drawn;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (draws_from_all(rows[i])) drawn.push_back(i);
  }
  std::vector<Candidate> local(drawn.size(), kNone);
  cpu::parallel_ranges(int64_t(drawn.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = size_t(begin); i < size_t(end); ++i) {
      const Row& row = rows[drawn[i]];
      const uint64_t position = cpu::draw(row.options, row.total), before = sums_before_[drawn[i]];
      if (position < before) continue;
      const auto found = weights(row).find(host_values(row.logits), position - before);
      if (found) local[i] = {row.logits.as<float>()[*found], first + int32_t(*found)};
    }
  });
  const std::vector<Candidate> all = gather(local);
  for (size_t at = 0; at < all.size(); ++at) {
    if (is_sent(all[at])) rows[drawn[at % drawn.size()]].chosen = all[at];
  }
}

}  // namespace tandem

#include "engine/data/loader.h"

#include <cstring>
#include <random>

#include "engine/data/ledger_lines.h"

namespace tandem {
namespace {

/// A number that no other call returns.
uint64_t make_key() {
  std::random_device device;
  return uint64_t(device()) << 32 | device();
}

/// Rank 0's.
uint64_t agree_on_key(Communicator& world) {
  uint64_t key = make_key();
  const auto all = world.exchange(std::as_bytes(std::span(&key, 1)), "text loader");
  std::memcpy(&key, all[0].data(), sizeof(key));
  return key;
}

}  // namespace

TextBlock::TextBlock(int64_t begin, int64_t count, int64_t seq, bool has_documents)
    : begin_(begin),
      count_(count),
      tokens_(size_t(count * seq)),
      targets_(tokens_.size()),
      document_starts_(has_documents ? tokens_.size() : 0) {}

void TextBlock::await() const {
  is_done_.wait(false);
  if (error_) std::rethrow_exception(error_);
}

void TextBlock::read(const Sampler& sampler, int64_t seq) {
  try {
    cursors_ = sampler.cursors(begin_);
    for (int64_t i = 0; i < count_; ++i) {
      const auto tokens = std::span(tokens_).subspan(size_t(i * seq), size_t(seq));
      const auto targets = std::span(targets_).subspan(size_t(i * seq), size_t(seq));
      sampler.read(begin_ + i, tokens, targets,
                   document_starts_.empty()
                       ? std::span<int32_t>()
                       : std::span(document_starts_).subspan(size_t(i * seq), size_t(seq)));
      hash_ += sample_hash(begin_ + i, tokens, targets);
    }
  } catch (...) {
    error_ = std::current_exception();
  }
  is_done_ = true;
  is_done_.notify_all();
}

Loader::Loader(const Sampler& sampler, int64_t seq)
    : sampler_(sampler), seq_(seq), thread_([this] { run(); }) {}

Loader::~Loader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_ptr<const TextBlock> Loader::request(int64_t begin, int64_t count) {
  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [](const auto& known) { return known.second.expired(); });
  std::weak_ptr<TextBlock>& known = known_[{begin, count}];
  if (auto block = known.lock()) return block;
  const auto block = std::make_shared<TextBlock>(begin, count, seq_, sampler_.document_mask());
  known = block;
  queue_.push_back(block);
  changed_.notify_all();
  return block;
}

void Loader::run() {
  while (true) {
    std::shared_ptr<TextBlock> block;
    {
      std::unique_lock lock(mutex_);
      while (!stop_ && queue_.empty()) {
        lock.unlock();
        const bool has_more = sampler_.read_ahead();
        lock.lock();
        if (!has_more) changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      }
      if (stop_) return;
      block = queue_.front().lock();
      queue_.pop_front();
    }
    if (block) block->read(sampler_, seq_);
  }
}

std::shared_ptr<Loader> share_loader(Communicator& world, const TokenSource& source,
                                     const Sampler& sampler, int64_t seq) {
  static std::mutex mutex;
  static std::map<std::pair<uint64_t, const TokenSource*>, std::weak_ptr<Loader>> loaders;
  const uint64_t key = agree_on_key(world);
  const std::lock_guard lock(mutex);
  std::erase_if(loaders, [](const auto& loader) { return loader.second.expired(); });
  std::weak_ptr<Loader>& shared = loaders[{key, &source}];
  if (auto loader = shared.lock()) return loader;
  const auto loader = std::make_shared<Loader>(sampler, seq);
  shared = loader;
  return loader;
}

}  // namespace tandem

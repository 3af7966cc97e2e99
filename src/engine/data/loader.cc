#include "engine/data/loader.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <system_error>
#include <utility>

#include "engine/data/ledger/ledger_lines.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// A number that no other call returns.
uint64_t make_key() {
  std::random_device device;
  return uint64_t(device()) << 32 | device();
}

struct LoaderRank {
  uint64_t key = 0, host = 0;
  int64_t process = 0;
};

template <typename Value>
std::vector<Value> exchange_values(Communicator& world, const Value& local) {
  std::vector<Value> values;
  for (const auto& blob : world.exchange(std::as_bytes(std::span(&local, 1)), "text loader")) {
    std::memcpy(&values.emplace_back(), blob.data(), sizeof(Value));
  }
  return values;
}

/// Processes of the ranks on this host, in the order of the ranks.
std::vector<int64_t> processes_of_host(const std::vector<LoaderRank>& ranks, uint64_t host) {
  std::vector<int64_t> processes;
  for (const LoaderRank& rank : ranks) {
    const bool is_new = std::ranges::find(processes, rank.process) == processes.end();
    if (rank.host == host && is_new) processes.push_back(rank.process);
  }
  return processes;
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

void TextBlock::finish() {
  is_done_ = true;
  is_done_.notify_all();
}

void TextBlock::read(TextClient& client) {
  try {
    client.read(begin_, count_, {tokens_, targets_, document_starts_, &hash_});
  } catch (...) {
    error_ = std::current_exception();
  }
  finish();
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
  finish();
}

Loader::Loader(const Sampler& sampler, int64_t seq) : Loader(sampler, seq, nullptr) {}

Loader::Loader(const Sampler& sampler, int64_t seq, std::unique_ptr<TextClient> client)
    : sampler_(sampler), seq_(seq), client_(std::move(client)) {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& failed) {
    throw IoError(fmt::format("no memory for the thread that reads the text: {}", failed.what()));
  }
}

Loader::~Loader() {
  server_.reset();  // waits for blocks
  if (client_) client_->stop();
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
  if (retained_blocks_ > 0) retained_.push_back(block);
  if (retained_.size() > retained_blocks_) retained_.pop_front();
  queue_.push_back(block);
  changed_.notify_all();
  return block;
}

processes::SharedMemory::Handle Loader::serve(const MailboxShape& shape, size_t retained_blocks) {
  {
    const std::lock_guard lock(mutex_);
    retained_blocks_ = retained_blocks;
  }
  server_ = std::make_unique<TextServer>(
      shape, [this](int64_t begin, int64_t count, const TextView& text) {
        const auto block = request(begin, count);
        block->await();
        std::ranges::copy(block->tokens(), text.tokens.begin());
        std::ranges::copy(block->targets(), text.targets.begin());
        std::ranges::copy(block->document_starts(), text.document_starts.begin());
        *text.hash = block->hash();
      });
  return server_->handle();
}

void Loader::run() {
  while (true) {
    std::shared_ptr<TextBlock> block;
    {
      std::unique_lock lock(mutex_);
      while (!stop_ && queue_.empty()) {
        lock.unlock();
        const bool has_more = !client_ && sampler_.read_ahead();
        lock.lock();
        if (!has_more) changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      }
      if (stop_) return;
      block = queue_.front().lock();
      queue_.pop_front();
    }
    if (!block) continue;
    client_ ? block->read(*client_) : block->read(sampler_, seq_);
  }
}

std::shared_ptr<Loader> share_loader(Communicator& world, const TokenSource& source,
                                     const Sampler& sampler, const LoaderRequests& requests) {
  static std::mutex mutex;
  static std::map<std::pair<uint64_t, const TokenSource*>, std::weak_ptr<Loader>> loaders;
  using Handle = processes::SharedMemory::Handle;
  const LoaderRank local{make_key(), processes::host_identity(), int64_t(::getpid())};
  const std::vector<LoaderRank> ranks = exchange_values(world, local);
  const std::vector<int64_t> processes = processes_of_host(ranks, local.host);
  const auto of_host = [&](const LoaderRank& rank) { return rank.host == local.host; };
  const auto first = size_t(std::ranges::find_if(ranks, of_host) - ranks.begin());
  const bool reads = size_t(world.rank()) == first;
  const MailboxShape shape{int(processes.size()) - 1, requests.max_count, requests.seq,
                           sampler.document_mask()};
  const std::pair key(ranks[0].key, &source);
  std::shared_ptr<Loader> loader;
  Handle handle;
  if (reads && processes.size() > 1) {
    loader = std::make_shared<Loader>(sampler, requests.seq);
    try {
      handle = loader->serve(shape, size_t(2 * requests.of_step));
    } catch (const IoError&) {  // each process reads for itself
    }
  }
  handle = exchange_values(world, handle)[first];
  const std::lock_guard lock(mutex);
  std::erase_if(loaders, [](const auto& known) { return known.second.expired(); });
  std::weak_ptr<Loader>& shared = loaders[key];
  if (!loader) loader = shared.lock();
  if (!loader) {
    std::unique_ptr<TextClient> client;
    const auto number = std::ranges::find(processes, local.process) - processes.begin();
    try {
      if (handle.fd >= 0 && number > 0) {
        client = std::make_unique<TextClient>(shape, int(number) - 1, handle, world.deadline());
      }
    } catch (const IoError&) {  // it reads for itself
    }
    loader = std::make_shared<Loader>(sampler, requests.seq, std::move(client));
  }
  shared = loader;
  return loader;
}

}  // namespace tandem

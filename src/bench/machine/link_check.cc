#include "bench/machine/link_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "comm/exec.h"
#include "core/exec.h"
#include "core/system/process/clock.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using LinkClock = std::chrono::steady_clock;

constexpr double kNever = 1e18;
/// Further messages over a link that has needed less than this time for one.
constexpr double kMoreSeconds = 0.05;
constexpr int kMaxMore = 30;

/// Opponent of `rank` in a round of a tournament of `players`, an even number (circle method).
int opponent(int players, int round, int rank) {
  const int last = players - 1;
  if (rank == last) return round;
  const int other = ((2 * round - rank) % last + last) % last;
  return other == rank ? last : other;
}

uint64_t seed_of(int from, int to, int message) {
  return (uint64_t(from) << 40) + (uint64_t(to) << 16) + uint64_t(message);
}

class Links {
 public:
  Links(Communicator& comm, const LinkCheck& check)
      : comm_(comm),
        check_(check),
        exec_(make_exec(comm)),
        rank_(comm.rank()),
        size_(comm.size()),
        words_((check.message_bytes / 8 + size_t(size_)) / size_t(size_) * size_t(size_)),
        host_(words_),
        source_((words_ + 1) * 8, exec_.device),
        sent_(size_t(size_)),
        awaited_(size_t(size_)) {
    comm.set_deadline(kPhaseDeadlines * check.seconds);
    buffer_ = comm.allocate((words_ + size_t(size_)) * 8, size_);  // and a number from each rank
    for (int from = 0; from < size_; ++from) {
      health_.incoming.push_back(
          {.from = from,
           .to = rank_,
           .shared_memory = from == rank_ || buffer_->peer(from) != nullptr});
    }
  }

  LinksHealth run(const std::function<void(const std::string&)>& progress) {
    progress("loopback");
    check_message(rank_, rank_);
    const int players = size_ + size_ % 2;
    for (int round = 0; round + 1 < players; ++round) {
      progress(fmt::format("links, round {} of {}", round + 1, players - 1));
      comm_.barrier("a round of links");
      const int peer = opponent(players, round, rank_);
      if (peer < size_) check_pair(peer);
    }
    if (size_ == 1 || is_any_unreachable()) return health_;
    progress("all-to-all");
    check_all_to_all();
    progress("ring all-reduce");
    check_ring();
    comm_.barrier("the end of the links' check");
    return health_;
  }

 private:
  void put(int peer, const Memory& source, size_t first, size_t words, size_t to) {
    comm_.put(peer, *buffer_, to * 8, source.data() + first * 8, words * 8, rank_,
              ++sent_[size_t(peer)]);
  }
  void put_signal(int peer) { put(peer, source_, 0, 0, 0); }
  void await(int peer, const char* what) {
    comm_.wait(*buffer_, peer, ++awaited_[size_t(peer)], {what, peer});
  }

  void upload(std::span<const uint64_t> words, size_t first) {
    const auto bytes = int64_t(words.size_bytes());
    copy(exec_, Tensor(words.data(), DType::u8, {bytes}),
         source_.view(DType::u8, {bytes}, first * 8));
  }
  std::span<uint64_t> download(size_t first, size_t words) {
    const auto bytes = int64_t(words * 8);
    copy(exec_, Tensor(buffer_->local() + first * 8, DType::u8, {bytes}, exec_.device),
         Tensor(host_.data(), DType::u8, {bytes}));
    return std::span(host_).first(words);
  }
  /// Words of `source_` that `peer` is to receive, with a wrong bit if that is asked for.
  void make_message(int peer, int message, size_t first, size_t words) {
    const auto chunk = std::span(host_).first(words);
    fill_pattern(chunk, seed_of(rank_, peer, message));
    if (check_.fault == CheckFault::message && peer == (rank_ + 1) % size_) {
      chunk[words / 2] ^= 1u << 9;
    }
    upload(chunk, first);
  }
  void compare(int from, int message, size_t first, size_t words) {
    health_.incoming[size_t(from)].wrong_bytes +=
        int64_t(count_wrong_bytes(download(first, words), seed_of(from, rank_, message)));
  }

  /// Messages [first, end) from `from` to `to`, of which this rank is at least one. Returns the
  /// receiver's shortest time, or `best`.
  double exchange_messages(int from, int to, int first, int end, double best) {
    for (int message = first; message < end; ++message) {
      if (rank_ == from) make_message(to, message, 0, words_);
      if (from != to && rank_ == from) put_signal(to);
      if (from != to && rank_ == to) await(from, "an offer of a message");
      const auto begin = LinkClock::now();
      if (from != to && rank_ == to) put_signal(from);
      if (from != to && rank_ == from) await(to, "a request for a message");
      if (rank_ == from) put(to, source_, 0, words_, 0);
      if (rank_ == to) {
        await(from, "a message");
        best = std::min(best, seconds_since(begin));
        compare(from, message, 0, words_);
      }
      if (rank_ == from) comm_.flush();
    }
    return best;
  }

  /// A few messages, then more over a fast link, which is soon done: one of them will meet no other
  /// program.
  void check_message(int from, int to) {
    double best = exchange_messages(from, to, 0, check_.messages, kNever);
    if (from != to) {
      uint64_t more = 0;
      if (rank_ == to) {
        more = uint64_t(std::clamp(kMoreSeconds / best, 0., double(kMaxMore)));
        upload(std::span(&more, 1), words_);
        put(from, source_, words_, 1, words_ + size_t(rank_));
        comm_.flush();
      } else {
        await(to, "a number of messages");
        more = std::min<uint64_t>(download(words_ + size_t(to), 1)[0], kMaxMore);
      }
      best = exchange_messages(from, to, check_.messages, check_.messages + int(more), best);
    }
    if (rank_ == to) {
      health_.incoming[size_t(from)].gbps = double(words_ * 8) / std::max(best, 1e-9) / 1e9;
    }
  }

  void check_latency(int peer) {
    LinkHealth& link = health_.incoming[size_t(peer)];
    for (int ping = 0; ping < check_.pings; ++ping) {
      const auto begin = LinkClock::now();
      if (rank_ < peer) put_signal(peer);
      await(peer, "a ping");
      if (rank_ > peer) put_signal(peer);
      const double us = 1e6 * seconds_since(begin) / 2;
      // The first ones make the connection, and wait for the other rank to come.
      if (ping == 1 || (ping > 1 && us < link.latency_us)) link.latency_us = us;
    }
  }

  void check_pair(int peer) {
    const int low = std::min(rank_, peer), high = std::max(rank_, peer);
    comm_.set_deadline(check_.seconds);
    try {
      check_latency(peer);
      check_message(low, high);
      check_message(high, low);
    } catch (const Timeout&) {
      health_.incoming[size_t(peer)].unreachable = true;
    }
    comm_.set_deadline(kPhaseDeadlines * check_.seconds);
  }

  bool is_any_unreachable() {
    const bool here = std::ranges::any_of(health_.incoming, &LinkHealth::unreachable);
    const auto all = comm_.exchange(std::as_bytes(std::span(&here, 1)), "unreachable links");
    return std::ranges::any_of(all, [](const auto& blob) { return blob.at(0) != std::byte{0}; });
  }

  void check_all_to_all() {
    const size_t words = words_ / size_t(size_);
    double best = 0;
    for (int message = 0; message < check_.messages; ++message) {
      for (int peer = 0; peer < size_; ++peer) {
        make_message(peer, message, size_t(peer) * words, words);
      }
      comm_.barrier("an all-to-all");
      const auto begin = LinkClock::now();
      for (int i = 1; i < size_; ++i) {
        const int peer = (rank_ + i) % size_;
        put(peer, source_, size_t(peer) * words, words, size_t(rank_) * words);
      }
      for (int i = 1; i < size_; ++i) await((rank_ + i) % size_, "an all-to-all");
      const double took = seconds_since(begin);
      best = message == 0 ? took : std::min(best, took);
      comm_.flush();
      for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_) compare(peer, message, size_t(peer) * words, words);
      }
    }
    health_.all_to_all_gbps = double(words * 8) * (size_ - 1) / std::max(best, 1e-9) / 1e9;
  }

  /// Word of this rank's contribution to the all-reduce; sums of these do not overflow.
  static uint64_t contribution(int rank, uint64_t word) {
    return uint64_t(rank + 1) * (word % 65536 + 1);
  }

  /// All-reduce on a ring: in each of 2 (N - 1) steps a rank sends a chunk to the next one, first
  /// partial sums, then sums. Chunks arrive at their offset. A step's message has been compared
  /// before the next is awaited; the neighbour's next put of that chunk is a turn of the ring away.
  void check_ring() {
    const size_t words = words_ / size_t(size_);
    const int next = (rank_ + 1) % size_, previous = (rank_ + size_ - 1) % size_;
    double took = 0;
    comm_.barrier("a ring");
    for (int step = 0; step < 2 * (size_ - 1); ++step) {
      const bool sums = step >= size_ - 1;
      const auto chunk_at = [&](int back) {
        return size_t((rank_ - step - back + 2 * size_) % size_);
      };
      const size_t sent = chunk_at(0), received = chunk_at(1);
      if (step == 0) {
        for (size_t i = 0; i < words; ++i) host_[i] = contribution(rank_, sent * words + i);
        upload(std::span(host_).first(words), sent * words);
      }
      const auto begin = LinkClock::now();
      put(next, source_, sent * words, words, sent * words);
      await(previous, "a ring");
      took += seconds_since(begin);
      comm_.flush();
      const auto partial = download(received * words, words);
      const int terms = sums ? size_ : step + 1;
      uint64_t factor = 0;  // the sum of the terms' ranks + 1
      for (int i = 0; i < terms; ++i) {
        factor += uint64_t((previous - i + size_) % size_) + 1;
      }
      int64_t wrong = 0;
      for (size_t i = 0; i < words; ++i) {
        const uint64_t word = received * words + i;
        wrong += partial[i] == factor * (word % 65536 + 1) ? 0 : 8;
        if (!sums) partial[i] += contribution(rank_, word);
      }
      health_.incoming[size_t(previous)].wrong_bytes += wrong;
      upload(partial, received * words);
    }
    health_.ring_gbps = double(words * 8) * 2 * (size_ - 1) / std::max(took, 1e-9) / 1e9;
  }

  Communicator& comm_;
  const LinkCheck& check_;
  const Exec exec_;
  const int rank_, size_;
  const size_t words_;
  std::vector<uint64_t> host_;
  Memory source_;
  std::shared_ptr<SymmetricBuffer> buffer_;
  std::vector<uint64_t> sent_, awaited_;  ///< epochs, by peer
  LinksHealth health_;
};

}  // namespace

LinksHealth check_links(Communicator& comm, const LinkCheck& check,
                        const std::function<void(const std::string&)>& progress) {
  return Links(comm, check).run(progress);
}

}  // namespace tandem

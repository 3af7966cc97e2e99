#include "fit/methods/api_bcd_async.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "fit/exchange/token_mail.h"
#include "fit/methods/token_walk.h"
#include "fit/problem/vectors.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

using Clock = std::chrono::steady_clock;
using Vote = TokenMail::Vote;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// A token after a visit, as the visited client's rank has seen it.
struct Record {
  double seconds = 0;
  int64_t round = 0;
  double distance = 0;
  double objective = kNan;  // of the last record of a rank and token
  int64_t bytes_sent = 0;   // by the rank, so far
  int token = 0;
  int rank = 0;
  Vote vote = Vote::going;
};

bool is_recorded(int64_t round) {
  constexpr uint64_t kPerDoubling = 128;
  const uint64_t spacing = std::bit_floor(uint64_t(round)) / kPerDoubling;
  return spacing < 2 || uint64_t(round) % spacing == 0;
}

/// Repeats walks after the run, to count their floats as rounds do.
class WalkFloats {
 public:
  /// Token m has made its visits up to round ends[m].
  WalkFloats(const std::vector<TokenWalk>& walks, const std::vector<Record>& ends, int64_t floats)
      : walks_(walks), ends_(ends), floats_(floats) {
    for (const TokenWalk& walk : walks) visits_.push_back(walk.first());
  }

  /// Floats of rounds up to `round`, which does not fall.
  FloatCount count(int64_t round) {
    while (true) {
      int64_t next = round + 1;
      for (size_t m = 0; m < visits_.size(); ++m)
        if (is_made(m)) next = std::min(next, visits_[m]->round);
      if (next > round) return sum_;
      std::vector<TokenMove> moves;
      for (size_t m = 0; m < visits_.size(); ++m)
        if (is_made(m) && visits_[m]->round == next) move(int(m), moves);
      const FloatCount floats = count_floats(moves, floats_);
      sum_.up += floats.up;
      sum_.down += floats.down;
    }
  }

 private:
  bool is_made(size_t m) const { return visits_[m] && visits_[m]->round <= ends_[m].round; }

  void move(int token, std::vector<TokenMove>& moves) {
    std::optional<TokenWalk::Visit>& visit = visits_[size_t(token)];
    const auto next = walks_[size_t(token)].next(*visit);
    if (next) append_moves(token, visit->client, *next, moves);
    visit = next;
  }

  const std::vector<TokenWalk>& walks_;
  const std::vector<Record>& ends_;
  const int64_t floats_;
  std::vector<std::optional<TokenWalk::Visit>> visits_;  // the next ones
  FloatCount sum_;
};

class AsyncWalk {
 public:
  AsyncWalk(const Setup& setup, const ApiBcdParams& params, const Vector& target,
            const std::function<void(const FitPoint&)>& report)
      : setup_(setup),
        params_(params),
        target_(target),
        report_(report),
        graph_(choose_graph(setup.options)),
        clients_(setup, params),
        mail_(setup.channel, params.tokens, size_t(params.floats(setup.problem))),
        last_(size_t(params.tokens)),
        answers_(size_t(params.tokens), make_table().sum()) {
    for (int m = 0; m < params.tokens; ++m) {
      walks_.emplace_back(graph_, setup.options, m);
      const auto visit = walks_.back().first();
      if (visit && setup.channel.is_local(visit->client))
        guests_.push_back({m, visit->client, visit->round, make_table()});
      last_[size_t(m)] = {.distance = relative_distance(answers_[size_t(m)], target),
                          .token = m,
                          .rank = comm().rank()};
      if (visit) continue;
      last_[size_t(m)].vote = Vote::finished;
      if (comm().rank() == 0) mail_.vote(m, setup.options.max_rounds, Vote::finished);
    }
  }

  /// Collective.
  FitRun run() {
    comm().barrier("begin of the walk");
    begin_ = Clock::now();
    while (true) {
      walk();
      const std::vector<Record> records = gather();
      const std::vector<Record> ends = last_of_tokens(records);
      if (std::ranges::none_of(ends, [](const Record& end) { return end.vote == Vote::going; }))
        return make_run(records, ends);
      mail_.resume();  // a token has left the tolerance after the vote that ended the walk
    }
  }

 private:
  struct Guest {
    int token, client;
    int64_t round;
    TokenTable table;
  };

  Communicator& comm() const { return setup_.channel.communicator(); }
  TokenTable make_table() const { return {params_.tokens, setup_.problem.features()}; }

  void walk() {
    int64_t round = 0;  // of the last visit
    while (true) {
      while (const auto arrival = mail_.receive()) {
        Guest& guest = guests_.emplace_back(
            Guest{arrival->token, arrival->client, arrival->round, make_table()});
        std::ranges::copy(arrival->message, guest.table.numbers().begin());
      }
      const auto next = std::ranges::min_element(
          guests_, {}, [](const Guest& guest) { return std::pair(guest.round, guest.token); });
      // A round that has begun is completed: one rank stops where synchronous rounds do.
      const bool in_round = next != guests_.end() && next->round <= round;
      if (!in_round && mail_.is_stopped()) return;
      if (next == guests_.end()) {
        mail_.wait_a_moment();
        continue;
      }
      Guest guest = std::move(*next);
      guests_.erase(next);
      visit(guest);
      round = guest.round;
    }
  }

  void visit(Guest& guest) {
    const int m = guest.token;
    clients_.visit(guest.client, m, guest.round, guest.table);
    Vector& answer = answers_[size_t(m)] = guest.table.sum();
    Record& last = last_[size_t(m)];
    last.seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    last.round = guest.round;
    last.distance = relative_distance(answer, target_);
    const auto next = walks_[size_t(m)].next({guest.client, guest.round});
    const bool goes_on = next && last.distance < kDiverged;  // false for NaN
    if (goes_on) {
      std::optional<int> failed;
      if (next->failed != TokenWalk::kNone) failed = next->failed;
      mail_.send(m, next->client, next->round, failed, guest.table.numbers());
    }
    last.vote = !goes_on                              ? Vote::finished
                : last.distance <= setup_.options.tol ? Vote::within_tolerance
                                                      : Vote::going;
    last.bytes_sent = setup_.channel.bytes_sent();
    if (is_recorded(guest.round)) log_.push_back(last);
    mail_.vote(m, guest.round, last.vote);
    if (!report_ || comm().rank() != 0) return;
    FitPoint point;
    point.rounds = guest.round;
    point.bytes_sent = last.bytes_sent;
    point.distance = last.distance;
    report_(point);
  }

  /// Collective. Records of all ranks, in order of time.
  std::vector<Record> gather() {
    std::vector<Record> local = log_;
    for (Record last : last_) {
      last.objective = setup_.problem.value(answers_[size_t(last.token)]);
      local.push_back(last);
    }
    std::vector<Record> all;
    for (const auto& blob : comm().exchange(std::as_bytes(std::span(local)), "records of a walk")) {
      const size_t count = blob.size() / sizeof(Record);
      all.resize(all.size() + count);
      std::memcpy(&all[all.size() - count], blob.data(), blob.size());
    }
    std::ranges::stable_sort(all, {}, &Record::seconds);
    return all;
  }

  std::vector<Record> last_of_tokens(const std::vector<Record>& records) const {
    std::vector<Record> last(size_t(params_.tokens));
    for (const Record& record : records) {
      Record& to = last[size_t(record.token)];
      if (record.round >= to.round) to = record;
    }
    return last;
  }

  FitRun make_run(const std::vector<Record>& records, const std::vector<Record>& ends) const {
    FitRun run;
    run.bias = relative_distance(target_, setup_.problem.optimum());
    run.settings = params_.settings();
    run.settings.push_back({"async", 1});
    FitPoint& point = run.last;
    point.distance = relative_distance(make_table().sum(), target_);
    point.objective = kNan;
    run.history.push_back(point);
    WalkFloats floats(walks_, ends, params_.floats(setup_.problem));
    std::vector<double> distance(ends.size(), point.distance);
    std::vector<int64_t> rounds(ends.size(), 0), bytes_sent(size_t(comm().size()), 0);
    for (const Record& record : records) {
      int64_t& bytes = bytes_sent[size_t(record.rank)];
      bytes = std::max(bytes, record.bytes_sent);
      if (record.round <= rounds[size_t(record.token)]) continue;
      rounds[size_t(record.token)] = record.round;
      distance[size_t(record.token)] = record.distance;
      point.rounds = std::max(point.rounds, record.round);
      point.floats = floats.count(point.rounds);
      point.bytes_sent = std::reduce(bytes_sent.begin(), bytes_sent.end());
      point.distance = *std::ranges::max_element(distance);
      point.seconds = record.seconds;
      run.history.push_back(point);
    }
    point.bytes_sent = std::reduce(bytes_sent.begin(), bytes_sent.end());
    point.distance = point.objective = -std::numeric_limits<double>::infinity();
    for (const Record& end : ends) {
      point.distance = max_or_nan(point.distance, end.distance);
      point.objective = max_or_nan(point.objective, end.objective);
    }
    run.history.back() = point;
    run.reached_tol = point.distance <= setup_.options.tol;
    return run;
  }

  const Setup setup_;
  const ApiBcdParams params_;
  const Vector& target_;
  const std::function<void(const FitPoint&)>& report_;
  const Graph graph_;
  TokenClients clients_;
  TokenMail mail_;
  std::vector<TokenWalk> walks_;
  std::vector<Guest> guests_;    // tokens that have come to this rank
  std::vector<Record> last_;     // of each token on this rank
  std::vector<Vector> answers_;  // at these
  std::vector<Record> log_;
  Clock::time_point begin_;
};

}  // namespace

void check_async_walk(const Setup& setup, const ApiBcdParams& params) {
  constexpr double kGiB = 1 << 30, kMaxGiB = 1;
  const int ranks = setup.channel.communicator().size();
  const double size =
      double(TokenMail::bytes(ranks, params.tokens, size_t(params.floats(setup.problem)))) / kGiB;
  if (size <= kMaxGiB) return;
  throw InvalidArgument(
      fmt::format("--tokens {}: with --async, {} features and {} ranks their messages take {:.3g} "
                  "GiB a rank: expected at most {:g} GiB",
                  params.tokens, setup.problem.features(), ranks, size, kMaxGiB));
}

FitRun run_async_walk(const Setup& setup, const ApiBcdParams& params, const Vector& target,
                      const std::function<void(const FitPoint&)>& report) {
  return AsyncWalk(setup, params, target, report).run();
}

}  // namespace tandem::fit

// Tokens that walk between ranks without rounds.
#include "fit/exchange/token_mail.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem::fit {
namespace {

constexpr int kClients = 7, kTokens = 3;
constexpr int64_t kRounds = 200;
constexpr size_t kFloats = 5;

int client_at(int token, int64_t round) {
  return int(philox(1, uint64_t(token), uint64_t(round))[0] % kClients);
}

double number_at(int token, int64_t round, size_t k) {
  return double(round * 100 + token * 10 + int64_t(k));
}

/// Passes the tokens on for kRounds rounds; some messages also go to a client that loses them.
int64_t walk(Communicator& comm) {
  Channel channel(comm, kClients);
  TokenMail mail(channel, kTokens, kFloats);
  const auto send = [&](int token, int64_t round) {
    std::vector<double> message(kFloats);
    for (size_t k = 0; k < kFloats; ++k) message[k] = number_at(token, round, k);
    std::optional<int> failed;
    if (round % 5 == 0) failed = client_at(token, round + kRounds);
    mail.send(token, client_at(token, round), round, failed, message);
  };
  for (int token = 0; token < kTokens; ++token) {
    mail.vote(token, 0, TokenMail::Vote::going);
    if (channel.is_local(client_at(token, 0))) send(token, 1);
  }
  int64_t received = 0;
  while (!mail.is_stopped()) {
    const auto arrival = mail.receive();
    if (!arrival) {
      mail.wait_a_moment();
      continue;
    }
    const auto& [token, client, round, message] = *arrival;
    EXPECT_EQ(client, client_at(token, round));
    EXPECT_TRUE(channel.is_local(client));
    for (size_t k = 0; k < kFloats; ++k) EXPECT_EQ(message[k], number_at(token, round, k));
    ++received;
    if (round < kRounds) send(token, round + 1);
    mail.vote(token, round, round < kRounds ? TokenMail::Vote::going : TokenMail::Vote::finished);
  }
  comm.barrier();
  return received;
}

TEST(TokenMailTest, EveryTokenMakesItsWholeWalk) {
  for (const int ranks : {1, 2, 3, 4}) {
    std::atomic<int64_t> received = 0;
    run_threads({.ranks = ranks}, [&](Communicator& comm) { received += walk(comm); });
    EXPECT_EQ(received, kTokens * kRounds) << ranks;
  }
  std::atomic<int64_t> received = 0;
  run_threads({.ranks = 3, .link = EmulatedLink{1e8, 1e-4}},
              [&](Communicator& comm) { received += walk(comm); });
  EXPECT_EQ(received, kTokens * kRounds);
}

TEST(TokenMailTest, TokensOfALowerRoundComeFirst) {
  run_threads({.ranks = 1}, [&](Communicator& comm) {
    Channel channel(comm, kClients);
    TokenMail mail(channel, kTokens, kFloats);
    const std::vector<double> message(kFloats, 1.0);
    mail.send(0, 6, 9, std::nullopt, message);
    mail.send(2, 6, 8, std::nullopt, message);
    mail.send(1, 0, 9, std::nullopt, message);
    for (const int expected : {2, 0, 1}) {
      const auto arrival = mail.receive();
      ASSERT_TRUE(arrival);
      EXPECT_EQ(arrival->token, expected);
    }
    EXPECT_FALSE(mail.receive());
    EXPECT_EQ(channel.bytes_sent(), int64_t(3 * kFloats * sizeof(double)));
  });
}

TEST(TokenMailTest, WalkEndsWhenNoTokenIsGoing) {
  run_threads({.ranks = 2}, [&](Communicator& comm) {
    Channel channel(comm, kClients);
    TokenMail mail(channel, 2, kFloats);
    if (comm.rank() == 1) mail.vote(0, 4, TokenMail::Vote::within_tolerance);
    comm.barrier();
    EXPECT_FALSE(mail.is_stopped());  // token 1 has not voted
    comm.barrier();
    mail.vote(1, 5 + comm.rank(), comm.rank() ? TokenMail::Vote::going : TokenMail::Vote::finished);
    comm.barrier();
    EXPECT_FALSE(mail.is_stopped());  // its last vote counts
    comm.barrier();
    if (comm.rank() == 0) mail.vote(1, 7, TokenMail::Vote::finished);
    while (!mail.is_stopped()) mail.wait_a_moment();
    comm.barrier();
    mail.resume();
    if (comm.rank() == 0) mail.vote(1, 8, TokenMail::Vote::going);
    comm.barrier();
    EXPECT_FALSE(mail.is_stopped());
  });
}

TEST(TokenMailTest, TokenThatDoesNotComeIsReported) {
  try {
    run_threads({.ranks = 2, .deadline_s = 0.2}, [](Communicator& comm) {
      Channel channel(comm, kClients);
      TokenMail mail(channel, 1, kFloats);
      while (!mail.is_stopped()) mail.wait_a_moment();
    });
    FAIL() << "no error";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.op, "visit of any token");
    EXPECT_THAT(error.what(), testing::HasSubstr("waited 0.2 s: it never arrived"));
  }
}

// Ranks 1 and 2 pass a token on for longer than the deadline; ranks 0 and 3 see none.
TEST(TokenMailTest, RankWithoutVisitsWaitsAsLongAsOthersHaveThem) {
  using Clock = std::chrono::steady_clock;
  constexpr double kDeadlineS = 1.5;
  std::atomic<int> visits = 0;
  run_threads({.ranks = 4, .deadline_s = kDeadlineS}, [&](Communicator& comm) {
    Channel channel(comm, comm.size());
    TokenMail mail(channel, 1, kFloats);
    const std::vector<double> message(kFloats, 1.0);
    const auto begin = Clock::now();
    if (comm.rank() == 1) mail.send(0, 2, 1, std::nullopt, message);
    while (!mail.is_stopped()) {
      const auto arrival = mail.receive();
      if (!arrival) {
        mail.wait_a_moment();
        continue;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      ++visits;
      const bool ends = Clock::now() - begin > std::chrono::duration<double>(2 * kDeadlineS);
      const int64_t round = arrival->round;
      if (!ends) mail.send(0, 3 - arrival->client, round + 1, std::nullopt, message);
      mail.vote(0, round, ends ? TokenMail::Vote::finished : TokenMail::Vote::going);
    }
    comm.barrier();
  });
  EXPECT_GT(visits, 1);
}

}  // namespace
}  // namespace tandem::fit

#include "comm/rendezvous/store_client.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>

#include <algorithm>
#include <cstring>

#include "comm/wait_check.h"
#include "tandem/error.h"

namespace tandem::control {
void StoreClient::send(Header header, std::string_view name, std::span<const std::byte> blob) {
  require_lengths("store: a message", name.size(), blob.size());
  header.name_bytes = uint32_t(name.size());
  header.blob_bytes = uint32_t(blob.size());
  const std::lock_guard lock(sending_);
  if (stuck_) return;
  channel_.queue(Channel::serialize(header, name, blob));
  uint64_t sent = channel_.sent_bytes();
  auto until = after(stall_s_);
  while (channel_.drain() && channel_.queued()) {
    if (sent != channel_.sent_bytes()) until = after(stall_s_);
    sent = channel_.sent_bytes();
    stuck_ = !wait_until(fd(), POLLOUT, until);
    if (stuck_) return;
  }
}

StoreClient::Pending StoreClient::request(Header header, std::string_view name,
                                          std::span<const std::byte> blob) {
  auto pending = std::make_shared<Reply>();
  {
    const std::lock_guard lock(requests_);
    if (header.value == 0) header.value = next_++;
    pending_[header.value] = pending;
  }
  send(header, name, blob);
  return pending;
}

void StoreClient::set(std::string_view key, std::span<const std::byte> value, int lease_s) {
  send({Kind::set, lease_s, 0, 0, 0}, key, value);
}

StoreClient::Pending StoreClient::get(std::span<const std::string> keys, bool wait) {
  return request({Kind::get, wait ? 1 : 0, 0, 0, 0}, fmt::format("{}", fmt::join(keys, "\n")), {});
}

StoreClient::Pending StoreClient::add(std::string_view key, int64_t number) {
  return request({Kind::add, rank_, 0, 0, 0}, key, std::as_bytes(std::span(&number, 1)));
}

void StoreClient::watch(std::string_view family, bool settings) {
  send({Kind::watch, settings ? 1 : 0, 0, 0, 0}, family, {});
}

StoreClient::Pending StoreClient::meet(const Meeting& meeting) {
  const MeetHeader header{uint32_t(meeting.count), uint32_t(meeting.index),
                          uint32_t(meeting.compared.size()), meeting.gone_count ? 1u : 0u};
  Blob blob;
  for (const auto bytes :
       {std::as_bytes(std::span(&header, 1)), bytes_of(meeting.compared), meeting.blob}) {
    blob.insert(blob.end(), bytes.begin(), bytes.end());
  }
  return request({Kind::meet, rank_, number_of_meeting(meeting.name), 0, 0}, meeting.name, blob);
}

StoreClient::Pending StoreClient::ask_missing(std::string_view meeting) {
  return request({Kind::overdue, rank_, 0, 0, 0}, meeting, {});
}

void StoreClient::leave() {
  send({Kind::bye, rank_, 0, 0, 0}, {}, {});
}

std::vector<Blob> StoreClient::values(const Reply& reply) {
  return split_blobs(reply.message.payload);
}

int64_t StoreClient::number(const Reply& reply) {
  int64_t number = 0;
  const auto& bytes = reply.message.payload;
  std::memcpy(&number, bytes.data(), std::min(bytes.size(), sizeof number));
  return number;
}

Met StoreClient::met(const Reply& reply) {
  Met met{reply.message.header.rank, {}, {}, split_blobs(reply.message.payload)};
  if (met.differs < 0) return met;
  if (met.blobs.size() == 2) {
    met.first = text_of(met.blobs[0]);
    met.other = text_of(met.blobs[1]);
  }
  met.blobs.clear();
  return met;
}

std::vector<int> StoreClient::missing(const Reply& reply) {
  std::vector<int> missing(reply.message.payload.size() / sizeof(int));
  if (!missing.empty()) {
    std::memcpy(missing.data(), reply.message.payload.data(), missing.size() * sizeof(int));
  }
  return missing;
}

bool StoreClient::receive(const OnEvent& on_event, const Reply* last) {
  const std::lock_guard receiving(receiving_);
  for (;;) {
    const bool alive = channel_.fill();
    Message message;
    if (!channel_.take(message)) return alive;
    if (message.header.kind == Kind::event) {
      for (const Event& event : split_events(message.payload)) on_event(event);
      continue;
    }
    Pending pending;
    {
      const std::lock_guard lock(requests_);
      const auto found = pending_.find(message.header.value);
      if (found == pending_.end()) continue;
      pending = std::move(found->second);
      pending_.erase(found);
    }
    pending->message = std::move(message);
    pending->here.store(true, std::memory_order_release);
    if (pending.get() == last) return true;
  }
}

bool StoreClient::await(const Pending& pending, Clock::time_point until, const OnEvent& on_event) {
  while (!pending->here) {
    if (!receive(on_event, pending.get()) && !pending->here) {
      throw Aborted(0, "the rendezvous store has ended");
    }
    if (pending->here) return true;
    if (Clock::now() >= until) return false;
    wait_until(fd(), POLLIN, next_wait_check(until));
    check_wait();
  }
  return true;
}

}  // namespace tandem::control

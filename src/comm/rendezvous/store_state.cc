#include "comm/rendezvous/store_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tandem::control {
namespace {

constexpr size_t kMaxMembers = size_t(1) << 20;

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

Channel::Bytes message_of(Kind kind, int rank, uint64_t value, std::span<const std::byte> blob) {
  return Channel::serialize({kind, rank, value, 0, uint32_t(blob.size())}, {}, blob);
}

}  // namespace

bool StoreState::handle(int client, const Message& message, Clock::time_point now) {
  switch (message.header.kind) {
    case Kind::set:
      return set(client, message, now);
    case Kind::get:
      return get(client, message);
    case Kind::add:
      return add(client, message);
    case Kind::watch: {
      Family& family = families_[std::string(family_of(key_of(message)))];
      (message.header.rank == 1 ? family.watchers : family.removal_watchers).push_back(client);
      return true;
    }
    case Kind::meet:
      return meet(client, message);
    case Kind::overdue:
      return tell_missing(client, message);
    case Kind::bye:
    case Kind::reply:
    case Kind::event:
    case Kind::met:
      return false;
  }
  return false;
}

void StoreState::reply(int client, uint64_t number, std::span<const std::byte> blob) {
  send_(client, message_of(Kind::reply, 0, number, blob));
}

bool StoreState::set(int client, const Message& message, Clock::time_point now) {
  if (message.header.rank < 0) return false;
  const std::string key(key_of(message));
  const auto blob = blob_of(message);
  Value& value = values_[key];
  value.bytes.assign(blob.begin(), blob.end());
  const bool leased = message.header.rank > 0;
  if (leased && value.owner != client) leased_by_[size_t(client)].push_back(key);
  value.owner = leased ? client : -1;
  value.until = leased ? now + std::chrono::seconds(message.header.rank) : Clock::time_point::max();
  leased ? void(leases_[key] = value.until) : void(leases_.erase(key));
  note(Change::set, key, value.bytes);
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return true;
  const auto requests = std::move(found->second);
  waiting_.erase(found);
  for (const auto& request : requests) {
    if (--request->missing == 0) reply_values(*request);
  }
  return true;
}

bool StoreState::get(int client, const Message& message) {
  const auto request = std::make_shared<Waiting>(
      Waiting{client, message.header.value, lines_of(key_of(message)), 0});
  if (message.header.rank == 1) {
    for (const std::string& key : request->keys) {
      if (values_.contains(key)) continue;
      waiting_[key].push_back(request);
      ++request->missing;
    }
  }
  if (request->missing == 0) reply_values(*request);
  return true;
}

void StoreState::reply_values(const Waiting& request) {
  Blob all;
  for (const std::string& key : request.keys) {
    const auto found = values_.find(key);
    append_blob(all, found == values_.end() ? std::span<const std::byte>() : found->second.bytes);
  }
  reply(request.client, request.number, all);
}

bool StoreState::add(int client, const Message& message) {
  const auto blob = blob_of(message);
  int64_t sum = 0, more = 0;
  Value& value = values_[std::string(key_of(message))];
  if (blob.size() != sizeof more || (!value.bytes.empty() && value.bytes.size() != sizeof sum)) {
    return false;
  }
  if (!value.bytes.empty()) std::memcpy(&sum, value.bytes.data(), sizeof sum);
  std::memcpy(&more, blob.data(), sizeof more);
  sum = int64_t(uint64_t(sum) + uint64_t(more));
  const auto bytes = std::as_bytes(std::span(&sum, 1));
  value.bytes.assign(bytes.begin(), bytes.end());
  reply(client, message.header.value, bytes);
  return true;
}

bool StoreState::meet(int client, const Message& message) {
  const auto bytes = blob_of(message);
  MeetHeader header;
  if (bytes.size() < sizeof header) return false;
  std::memcpy(&header, bytes.data(), sizeof header);
  const auto rest = bytes.subspan(sizeof header);
  if (header.count > kMaxMembers || header.index >= header.count ||
      header.compared_bytes > rest.size() ||
      (header.gone_count == 1 && header.count != gone_.size())) {
    return false;
  }
  const std::string key(key_of(message));
  const auto [entry, first] = meetings_.try_emplace(key);
  Meeting& meeting = entry->second;
  if (first) {
    meeting.members.resize(header.count);
    meeting.gone_count = header.gone_count == 1;
    for (size_t gone = 0; meeting.gone_count && gone < gone_.size(); ++gone) {
      if (gone_[gone]) mark_gone(meeting, gone);
    }
  }
  if (meeting.members.size() != header.count) return false;
  Member& member = meeting.members[header.index];
  if (member.here) return false;
  const auto blob = rest.subspan(header.compared_bytes);
  member = {true, client, std::string(text_of(rest.first(header.compared_bytes))),
            Blob(blob.begin(), blob.end())};
  ++meeting.arrived;
  end_if_complete(key);
  return true;
}

void StoreState::mark_gone(Meeting& meeting, size_t client) {
  Member& member = meeting.members[client];
  if (!member.here) ++meeting.arrived;
  member.here = true;
}

void StoreState::end_if_complete(const std::string& key) {
  const auto found = meetings_.find(key);
  if (found->second.arrived < found->second.members.size()) return;
  const auto members = std::move(found->second.members);
  meetings_.erase(found);
  const auto differs = std::find_if(members.begin(), members.end(), [&](const Member& member) {
    return member.client >= 0 && member.compared != members.front().compared;
  });
  Blob result;
  if (differs != members.end()) {
    append_blob(result, bytes_of(members.front().compared));
    append_blob(result, bytes_of(differs->compared));
  } else if (std::any_of(members.begin(), members.end(),
                         [](const Member& member) { return !member.blob.empty(); })) {
    for (const Member& member : members) append_blob(result, member.blob);
  }
  const int index = differs == members.end() ? -1 : int(differs - members.begin());
  const auto bytes = message_of(Kind::met, index, number_of_meeting(key), result);
  for (const Member& member : members) {
    if (member.client >= 0) send_(member.client, bytes);
  }
}

bool StoreState::tell_missing(int client, const Message& message) {
  const auto found = meetings_.find(std::string(key_of(message)));
  std::vector<int32_t> missing;
  if (found != meetings_.end()) {
    const auto& members = found->second.members;
    for (size_t i = 0; i < members.size(); ++i) {
      if (!members[i].here) missing.push_back(int32_t(i));
    }
  }
  reply(client, message.header.value, std::as_bytes(std::span(missing)));
  return true;
}

void StoreState::note(Change change, std::string_view key, const Blob& value) {
  const auto found = families_.find(std::string(family_of(key)));
  if (found == families_.end()) return;
  Family& family = found->second;
  const Event event{change, std::string(key), value};
  if (!family.watchers.empty()) append_event(family.events, event);
  if (change != Change::set && !family.removal_watchers.empty()) {
    append_event(family.removals, event);
  }
}

void StoreState::send_events() {
  const auto send_all = [&](Blob& events, const std::vector<int>& watchers) {
    if (events.empty()) return;
    const auto bytes = message_of(Kind::event, 0, 0, std::exchange(events, {}));
    for (const int client : watchers) send_(client, bytes);
  };
  for (auto& [name, family] : families_) {
    send_all(family.events, family.watchers);
    send_all(family.removals, family.removal_watchers);
  }
}

void StoreState::remove(std::unordered_map<std::string, Value>::iterator entry, Change change) {
  note(change, entry->first, entry->second.bytes);
  leases_.erase(entry->first);
  values_.erase(entry);
}

void StoreState::remove_client(int client, bool lost) {
  gone_[size_t(client)] = true;
  for (const auto& key : std::exchange(leased_by_[size_t(client)], {})) {
    const auto leased = values_.find(key);
    if (leased == values_.end() || leased->second.owner != client) continue;
    remove(leased, lost ? Change::lost : Change::left);
  }
  for (auto entry = waiting_.begin(); entry != waiting_.end();) {
    std::erase_if(entry->second, [&](const auto& request) { return request->client == client; });
    entry = entry->second.empty() ? waiting_.erase(entry) : std::next(entry);
  }
  for (auto& [name, family] : families_) {
    std::erase(family.watchers, client);
    std::erase(family.removal_watchers, client);
  }
  std::vector<std::string> meetings;
  for (auto& [key, meeting] : meetings_) {
    for (Member& member : meeting.members) {
      if (member.client == client) member.client = -1;  // nothing is sent to it
    }
    if (!meeting.gone_count) continue;
    mark_gone(meeting, size_t(client));
    meetings.push_back(key);
  }
  for (const auto& key : meetings) end_if_complete(key);
}

void StoreState::expire(Clock::time_point now) {
  std::vector<std::string> keys;
  for (const auto& [key, until] : leases_) {
    if (until <= now) keys.push_back(key);
  }
  for (const auto& key : keys) remove(values_.find(key), Change::expired);
}

}  // namespace tandem::control

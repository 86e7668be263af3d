// A store that is a map, for ranks that are threads of one process.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "startup/tcp_rendezvous.h"

struct Store {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::string, std::string> values;
    int sets = 0, gets = 0;

    ddl::Start member(int rank, int size) {
        ddl::Start made;
        made.rank = rank;
        made.size = size;
        made.secret = std::string(80, 's');  // longer than a block of SHA-256
        made.set = [this](const std::string& key, const std::string& value) {
            const std::lock_guard lock(mutex);
            ++sets;
            values[key] = value;
            changed.notify_all();
            return true;
        };
        made.get = [this](const std::string& key, std::string* value, double seconds) {
            std::unique_lock lock(mutex);
            ++gets;
            const auto is_there = [&] { return values.count(key) == 1; };
            if (!changed.wait_for(lock, std::chrono::duration<double>(seconds), is_there)) return false;
            *value = values[key];
            return true;
        };
        return made;
    }
};
